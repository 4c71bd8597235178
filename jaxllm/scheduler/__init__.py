"""Decides what runs in each step. Pure Python and numpy: no jax on this side."""
