"""Samples the next token of each row on the device, from logits and sampling parameters."""
