"""Choosing the next token on the device, from logits and the sampling parameters of each row."""
