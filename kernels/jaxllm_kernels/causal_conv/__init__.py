"""A short causal convolution of each channel over the tokens of a sequence."""
