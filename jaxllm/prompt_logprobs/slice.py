"""What the two halves exchange: the feature's slices of a Schedule and of a StepResult.

The slice of a Schedule has two arrays for the device. `targets`, i32 [T], by flat token position,
has the prompt token that follows if its logprobs are wanted, else NO_TARGET. `wants_more`, i32 [],
says whether some row wants more than the best token of a position. A third array is the host's own:
`spans`, i32 [n, 3], has (row, first flat position, end) of each row that wants logprobs.

The slice of a StepResult has the fields of LogprobArrays, by flat token position.
"""

NAME = "prompt_logprobs"
NO_TARGET = -1
