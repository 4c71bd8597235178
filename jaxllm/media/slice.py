"""What the halves exchange: the feature's slice of a Schedule.

`rows`, i32 [T], by flat token position, has the row of the pool in which a tower has put the
embedding of the token's image; NO_ROW: the token has its own. What must be computed before the step
is in `Schedule.encodings`.

`ahead`, i32 [T], has how far ahead of itself a token sees: up to the end of its image, or not at
all. Only models have it in which the tokens of an image see each other.

`offsets`, i32 [NUM_AXES, T], has how far a token's positions in time, rows and columns are from its
place in the text. Only models with such positions have it. A step whose tokens need no `rows`, no
`ahead` or no `offsets`, leaves them out.
"""

NAME = "images"
NO_ROW = -1
NUM_AXES = 3
