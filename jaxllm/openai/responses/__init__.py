"""OpenAI's newer protocol: a response is a list of items, made of a list of items."""
