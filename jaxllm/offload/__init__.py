"""The second home of KV blocks: programs that move them, the host's memory, and files."""
