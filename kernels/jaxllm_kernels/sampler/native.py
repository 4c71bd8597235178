"""The sampler on CPU in C++.

XLA needs 2 to 3 CPU seconds to compile the sampler, and every step program has one. A call of this
op compiles in no time.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.native.library import Library
from jaxllm_kernels.sampler.api import LogprobOutput, Sampled, SlotTables


@dataclass(frozen=True)
class NativeSampler:
    """`api.Sampler` by the native library."""

    library: Library

    @classmethod
    def load(cls, library: Library) -> "NativeSampler":
        """Load the functions; raise ValueError, which says why, if they cannot be built."""
        library.add_sampler()
        return cls(library)

    def sample(
        self,
        logits: jax.Array,
        params: jax.Array,
        *,
        flags: jax.Array,
        slots: jax.Array,
        output_index: jax.Array,
        positions: jax.Array,
        tables: SlotTables,
        num_logprobs: int,
        masks: jax.Array | None,
        pending: jax.Array | None,
    ) -> Sampled:
        num_rows = len(logits)
        tokens, is_valid, *logprobs = jax.ffi.ffi_call(
            self.library.target("jaxllm_sample", jnp.float32),
            (
                jax.ShapeDtypeStruct((num_rows,), jnp.int32),
                jax.ShapeDtypeStruct((num_rows,), jnp.bool_),
                *_logprobs(num_rows, num_logprobs),
            ),
        )(
            logits,
            params,
            flags,
            slots,
            output_index,
            positions,
            # What is not there has no columns.
            jnp.zeros((num_rows, 0), jnp.uint32) if masks is None else masks,
            jnp.zeros((num_rows, 0), jnp.int32) if pending is None else pending,
            *tables._replace(full_rounds=_rounds(tables)),
        )
        return Sampled(tokens, is_valid, LogprobOutput(*logprobs))

    def logprobs(
        self, logits: jax.Array, targets: jax.Array, *, num_logprobs: int, wants_more: jax.Array
    ) -> LogprobOutput:
        call = jax.ffi.ffi_call(
            self.library.target("jaxllm_logprobs", jnp.float32),
            _logprobs(len(logits), num_logprobs),
        )
        return LogprobOutput(*call(logits, targets, wants_more))

    def record(
        self,
        tables: SlotTables,
        tokens: jax.Array,
        num_tokens: jax.Array,
        *,
        flags: jax.Array,
        slots: jax.Array,
    ) -> SlotTables:
        counts, rounds, recent = tables.token_counts, _rounds(tables), tables.recent_tokens
        counts, rounds, recent = jax.ffi.ffi_call(
            self.library.target("jaxllm_record", jnp.float32),
            [jax.ShapeDtypeStruct(table.shape, table.dtype) for table in (counts, rounds, recent)],
            input_output_aliases={0: 0, 1: 1, 2: 2},
        )(counts, rounds, recent, tokens, num_tokens, flags, slots)
        if tables.full_rounds is None:
            rounds = None
        return tables._replace(token_counts=counts, full_rounds=rounds, recent_tokens=recent)


def _logprobs(num_rows: int, k: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (
        jax.ShapeDtypeStruct((num_rows, 1 + k), jnp.int32),
        jax.ShapeDtypeStruct((num_rows, 1 + k), jnp.float32),
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        jax.ShapeDtypeStruct((num_rows,), jnp.float32),
    )


def _rounds(tables: SlotTables) -> jax.Array:
    if tables.full_rounds is None:
        return jnp.zeros((len(tables.token_counts), 0), jnp.int32)
    return tables.full_rounds
