"""Kernels and their references, one folder per op. Imports jax and numpy, and nothing of jaxllm."""
