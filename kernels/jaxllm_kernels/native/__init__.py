"""Kernels in C++ for CPUs: how they are built, and what they share."""
