"""Structured output: answers that keep a form, which the request gives (see README.md)."""
