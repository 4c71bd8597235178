"""Adds an output to the residual stream and normalises the sum, together."""
