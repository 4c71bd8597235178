"""OpenAI's files and batches: what they look like, and where a server keeps them."""
