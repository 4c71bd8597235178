"""How models write reasoning: one file for each format."""
