"""The KV cache as the scheduler sees it: the blocks, their holders and their contents."""
