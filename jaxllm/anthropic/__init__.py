"""Anthropic's protocol: a message request becomes a chat request, and its answer a message."""
