"""The next token of every row of a step, from its logits, in one call."""
