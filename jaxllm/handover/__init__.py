"""Hands the KV blocks of computed prompts over from one engine to another."""
