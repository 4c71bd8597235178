"""What the halves of pooling exchange: the slices of a Schedule and of a StepResult.

The vectors of whole prompts are the step's own tail (`pool_rows`), so the slice `ROWS` of a
Schedule is the host's alone: `rows`, i32 [n], lists the rows that end their prompt. That of a
StepResult has `vectors`, f32 [>= rows, K].

The slice `TOKENS` is for requests that want a vector for each token. `spans`, i32 [n, 4], has (row,
first flat position, position in the prompt, tokens) of their rows. That of a StepResult has
`vectors`, f32 [>= tokens, K], by flat token position.
"""

ROWS = "pooled_rows"
TOKENS = "pooled_tokens"
