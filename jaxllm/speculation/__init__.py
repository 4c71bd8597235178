"""Drafters, on the device: they guess the next tokens of a request, for the next step to verify."""
