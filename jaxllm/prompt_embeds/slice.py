"""What the halves exchange: the feature's slice of a Schedule.

`rows`, i32 [T], by flat token position, has the row of the device's pool with the embedding that
stands in place of the token's own; NO_ROW: the token has its own. `data`, u8 [n, bytes], has the
embeddings of the step, which are written to the pool from the feature's first row on before the
step runs.
"""

NAME = "prompt_embeds"
NO_ROW = -1
