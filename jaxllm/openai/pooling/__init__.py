"""Embeddings, classes and scores: requests to prompts of an engine that pools; answers."""
