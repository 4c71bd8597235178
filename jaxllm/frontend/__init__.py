"""Validates, tokenises and detokenises, between the user and the engine core. Never uses jax."""
