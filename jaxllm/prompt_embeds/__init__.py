"""Prompts of embeddings."""
