"""Drafts what followed the last tokens where they were before, in the prompt or in the answer.

Of the earlier places that end with the same tokens, the one with the most equal tokens is taken,
and of equals the latest. If the text there runs into its own end, it is repeating itself, and the
draft goes on with the repetition.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm.speculation.drafter import NO_DRAFT
from jaxllm.speculative_config import Speculation

# How many places are compared at a time. A search takes as many rounds as the longest context of
# its rows needs, whatever the longest possible one.
_CHUNK = 4096


@dataclass(frozen=True)
class Ngram:
    """A drafter whose state is i32 [S, max_model_len]: the tokens of each slot's request."""

    min_lookup: int
    max_lookup: int

    @classmethod
    def of(cls, speculation: Speculation) -> "Ngram":
        return cls(speculation.min_lookup, speculation.max_lookup)

    def abstract(self, num_slots: int, max_model_len: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_slots, max_model_len), jnp.int32)

    def admit(self, state: jax.Array, slot: jax.Array, tokens: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(state, tokens, slot, axis=0)

    def record(
        self,
        state: jax.Array,
        tokens: jax.Array,
        num_tokens: jax.Array,
        slots: jax.Array,
        ends: jax.Array,
    ) -> jax.Array:
        index = jnp.arange(tokens.shape[1])
        places = (ends - num_tokens)[:, None] + index
        places = jnp.where(index < num_tokens[:, None], places, state.shape[1])
        return state.at[slots[:, None], places].set(tokens, mode="drop")

    def propose(
        self, state: jax.Array, num_drafts: int, slots: jax.Array, ends: jax.Array
    ) -> jax.Array:
        texts = state.at[slots].get(mode="clip")
        place = self._last_match(texts, ends)
        found = place > 0
        # Past the end of the text, the draft repeats what it has copied.
        period = jnp.maximum(ends - place, 1)[:, None]
        places = place[:, None] + jnp.arange(num_drafts) % period
        drafts = jnp.take_along_axis(texts, places, axis=1, mode="clip")
        return jnp.where(found[:, None], drafts, NO_DRAFT)

    def _last_match(self, texts: jax.Array, ends: jax.Array) -> jax.Array:
        """The place behind the match in each text, i32 [R]; 0 if there is none."""
        n, length = self.max_lookup, texts.shape[1]
        back = 1 + jnp.arange(n)
        # The last tokens, the newest first. What is before the first token equals nothing.
        last = jnp.take_along_axis(texts, ends[:, None] - back, axis=1, mode="clip")
        last = jnp.where(back <= ends[:, None], last, NO_DRAFT - 1)
        chunk = min(_CHUNK, length)
        num_chunks = -(-length // chunk)
        padded = jnp.pad(
            texts, ((0, 0), (n, num_chunks * chunk - length)), constant_values=NO_DRAFT
        )

        def best_of(index: jax.Array | int, best: jax.Array) -> jax.Array:
            first = index * chunk
            # Column c of `part` is the token before place `first` + c - n + 1.
            part = jax.lax.dynamic_slice_in_dim(padded, first, chunk + n, axis=1)
            places = first + jnp.arange(chunk)
            size, equal = jnp.zeros((len(texts), chunk), jnp.int32), True
            for step in range(n):
                before = part[:, n - 1 - step : n - 1 - step + chunk]
                equal = equal & (before == last[:, step : step + 1])
                size = size + equal
            counts = (size >= self.min_lookup) & (places < ends[:, None])
            score = jnp.where(counts, size * (length + 1) + places, 0)
            return jnp.maximum(best, jnp.max(score, axis=1))

        none = jnp.zeros(len(texts), jnp.int32)
        if num_chunks == 1:
            best = best_of(0, none)
        else:
            rounds = (jnp.max(ends) + chunk - 1) // chunk
            best = jax.lax.fori_loop(0, rounds, best_of, none)
        return best % (length + 1)
