"""Towers: what turns images into embeddings for a decoder. One file for each."""
