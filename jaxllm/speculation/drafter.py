"""The contract of a drafter with the step.

At the end of a step the drafter proposes tokens for every row that has sampled. They stay on the
device: if the host schedules a row with drafts, the next step computes them behind the row's newest
token, and accepts the leading ones that the model samples as well. So no drafter can change a
request's tokens. It decides how many of them a step brings.
"""

from typing import Any, Protocol

import jax

NO_DRAFT = -1  # no token of a vocabulary


class Drafter(Protocol):
    """Traced functions, and the state that they keep for each slot."""

    def abstract(self, num_slots: int, max_model_len: int) -> Any:
        """Shapes of the state: arrays whose first axis is the slot."""
        ...

    def admit(self, state: Any, slot: jax.Array, tokens: jax.Array) -> Any:
        """Note a request that takes a slot. `tokens` i32 [max_model_len] are those that it has,
        then any."""
        ...

    def record(
        self,
        state: Any,
        tokens: jax.Array,
        num_tokens: jax.Array,
        slots: jax.Array,
        ends: jax.Array,
    ) -> Any:
        """Note what a step has sampled: the first `num_tokens`, i32 [R], of each row's tokens, i32
        [R, n]. The last of them is at position `ends` - 1 of its sequence, i32 [R]. `slots` i32 [R]
        is out of range for padding."""
        ...

    def propose(self, state: Any, num_drafts: int, slots: jax.Array, ends: jax.Array) -> jax.Array:
        """Return drafts of the tokens from position `ends` on, i32 [R, num_drafts]: in each row
        some, then NO_DRAFT. Rows whose slot is out of range get any."""
        ...
