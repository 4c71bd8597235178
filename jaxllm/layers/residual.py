"""The residual stream between the parts of a layer, and between layers."""

from typing import NamedTuple

import jax
from jaxllm_kernels.add_norm.api import RMSNormConfig

from jaxllm.layers.context import StepContext
from jaxllm.layers.norm import Norm, RMSNorm


class Unadded(NamedTuple):
    """The stream, and an output that the next norm adds to it: together that is one launch."""

    stream: jax.Array
    output: jax.Array


Stream = jax.Array | Unadded


def join(stream: jax.Array, output: jax.Array, context: StepContext) -> Stream:
    """Add an output, or leave that to the next norm."""
    add_norm = context.add_norm
    if add_norm is None or not add_norm.supports(stream.shape[-1], stream.dtype):
        return stream + output
    return Unadded(stream, output)


def settle(stream: Stream) -> jax.Array:
    """The sum, for whoever is no norm."""
    return stream.stream + stream.output if isinstance(stream, Unadded) else stream


def normalise(stream: Stream, norm: Norm, context: StepContext) -> tuple[jax.Array, jax.Array]:
    """Return the sum and its norm."""
    if isinstance(stream, Unadded) and isinstance(norm, RMSNorm):
        spec, weight = norm.spec, None if norm.weight is None else norm.weight[...]
        config = RMSNormConfig(eps=spec.eps, offset=spec.offset, rounds_first=spec.rounds_first)
        assert context.add_norm is not None
        return context.add_norm(stream.stream, stream.output, weight, config)
    total = settle(stream)
    return total, norm(total)
