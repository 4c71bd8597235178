"""Where steps run: in this process, or on the ranks of several hosts."""
