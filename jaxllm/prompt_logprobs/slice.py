"""What the two halves say to each other: their slices of a Schedule and of a StepResult.

To the device: `targets`, i32 [T], by flat token position the prompt token that follows where its
logprob is wanted, NO_TARGET elsewhere; `wants_more`, i32 [], whether some row wants more than the
best token of a position. The host keeps `spans` there, too: i32 [n, 3], of each row that wants
some the row, and the flat positions from where up to where.

Back come the fields of LogprobArrays, by flat token position.
"""

NAME = "prompt_logprobs"
NO_TARGET = -1
