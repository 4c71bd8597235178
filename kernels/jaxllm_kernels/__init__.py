"""Kernels and their references, one folder per op. Knows jax and numpy, and nothing of jaxllm."""
