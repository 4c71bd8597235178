"""Parsers that split the text of an answer into reasoning, content and tool calls.

An `AnswerFormat` makes a parser for one answer, whole or streamed. `tools` and `reasoning` have a
file for each format, or for several alike. A format reads from a `TextStream` and writes deltas.
Parsers need only text, so servers, batches and scripts can use them.
"""
