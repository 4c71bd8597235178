"""What the halves exchange: the feature's slice of a Schedule.

`rows`, i32 [T], by flat token position, has the row of the pool in which a tower has put the
embedding of the token's image; NO_ROW: the token has its own. What must be computed before the step
is in `Schedule.encodings`.
"""

NAME = "images"
NO_ROW = -1
