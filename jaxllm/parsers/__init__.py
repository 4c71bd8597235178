"""What the text of an answer is made of: reasoning, content, and calls of tools.

An `AnswerFormat` makes a parser for one answer, whole or as it comes. `tools` and `reasoning` have
a file for each format, which reads from a `TextStream` and writes deltas. All of it needs nothing
but text: servers, batches and scripts use it alike.
"""
