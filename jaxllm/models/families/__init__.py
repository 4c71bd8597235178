"""One file for each family of models; the registry has a line for each of its architectures."""
