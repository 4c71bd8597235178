"""Low-rank products of adapters: each token with the matrices of its own adapter."""
