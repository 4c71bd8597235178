"""The experts of a layer: feed-forward networks, of which each token uses a few."""
