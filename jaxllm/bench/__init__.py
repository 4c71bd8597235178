"""Measuring: a server through HTTP, and the engine in this process."""
