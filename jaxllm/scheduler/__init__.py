"""Decides what runs in each step. It uses only Python and numpy, never jax."""
