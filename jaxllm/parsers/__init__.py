"""What the text of an answer is made of: reasoning, content, and calls of tools.

`tools` and `reasoning` have a file for each format. An `AnswerParser` runs one of each over an
answer, whole or as it comes, and needs nothing but text: servers, batches and scripts use it alike.
"""
