"""How models write tool calls into their answers: one file for each format.

`registry` lists the formats by name. `base` has the parser that runs them.
"""
