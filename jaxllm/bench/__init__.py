"""Benchmarks: of a server over HTTP, and of the engine in this process."""
