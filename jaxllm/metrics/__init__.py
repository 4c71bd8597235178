"""Figures about the engine, as plain data."""
