"""How models write calls of tools into their answers: one file for each format.

`registry` knows the formats by name, `base` has the parser that they all run in.
"""
