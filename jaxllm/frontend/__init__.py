"""Between the user and the engine core: validates, tokenises, detokenises. No jax here."""
