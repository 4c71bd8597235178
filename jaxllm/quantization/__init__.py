"""Weights that are stored in fewer bits: their forms, and where a checkpoint has them."""
