"""Loads a checkpoint from disk into arrays on devices."""
