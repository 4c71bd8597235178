"""Logprobs of prompt tokens, on the device: computed from the logits of the wanted positions."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxllm_kernels.sampler.api import LogprobOutput

from jaxllm.models.base import Model
from jaxllm.plan.buckets import Bucket
from jaxllm.prompt_logprobs.slice import NAME, NO_TARGET
from jaxllm.sampling.choose import most_likely
from jaxllm.sampling.layout import Layout
from jaxllm.sampling.logprobs import token_logprobs
from jaxllm.scheduler.schedule import Slice

# How many positions are computed at a time, since their logits are large.
_CHUNK = 64


class PromptLogprobs:
    """The feature's device half. Only programs for mixed steps have it."""

    name = NAME

    def __init__(self, num_logprobs: int, layout: Layout) -> None:
        """Compute at most `num_logprobs` logprobs for a position."""
        self._k = num_logprobs
        self._layout = layout

    def fields(self, bucket: Bucket) -> dict[str, tuple[int, ...]]:
        if bucket.decode_only:
            return {}
        return {"targets": (bucket.num_tokens,), "wants_more": ()}

    def pack(self, fields: Mapping[str, np.ndarray], its: Slice | None) -> None:
        fields["targets"][...] = NO_TARGET
        if its is not None:
            fields["targets"][: len(its["targets"])] = its["targets"]
            fields["wants_more"][...] = its["wants_more"]

    def compute(
        self, fields: Mapping[str, jax.Array], model: Model, hidden: jax.Array
    ) -> dict[str, jax.Array]:
        targets, wants_more = fields["targets"], fields["wants_more"] != 0
        tokens = len(targets)
        chunk = min(_CHUNK, tokens)

        def one_chunk(first: jax.Array) -> LogprobOutput:
            # A gather, not a slice: XLA:GPU keeps loops that slice out of its command buffers.
            places = jnp.minimum(first + jnp.arange(chunk, dtype=jnp.int32), tokens - 1)
            chosen = jnp.maximum(targets[places], 0)
            logits = model.compute_logits(hidden[places])
            if self._layout.op is not None:
                return self._layout.op.logprobs(
                    logits, chosen, num_logprobs=self._k, wants_more=wants_more
                )
            best = most_likely(logits, self._layout)
            return token_logprobs(
                logits, chosen, best, k=self._k, wants_more=wants_more, layout=self._layout
            )

        def compute() -> dict[str, jax.Array]:
            out = jax.lax.map(one_chunk, jnp.arange(0, tokens, chunk, dtype=jnp.int32))
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], out._asdict())

        def skip() -> dict[str, jax.Array]:
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(compute))

        return jax.lax.cond(jnp.any(targets != NO_TARGET), compute, skip)
