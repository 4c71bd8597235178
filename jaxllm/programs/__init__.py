"""What an engine compiles: declared, compiled, kept for the next start, and looked at."""
