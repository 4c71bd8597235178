"""The OpenAI-compatible HTTP server, and what makes a message of a model's text."""
