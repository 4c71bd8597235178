"""How models write tool calls into their answers: a file for each format, or for several alike.

`registry` lists the formats by name. `base` has the parser that runs them. The files between read
what formats have in common: `json_call`, `announced_json`, `python_call`, `nested` and
`parameter_value`.
"""
