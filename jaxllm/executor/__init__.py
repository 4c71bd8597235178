"""Where steps run: in this process, or (later) on the ranks of several hosts."""
