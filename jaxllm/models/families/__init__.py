"""One file for each family of models. The registry has a line for each architecture."""
