"""A short convolution as a mixer, as in LFM2: each channel is a filter over a few tokens.

What it filters is the product of two projections, and a third one multiplies what it lets through.
Channels are cut over the shards.
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxllm_kernels.recurrent.rows import StateRows

from jaxllm.errors import refused
from jaxllm.layers.context import Cache, LentCache, StepContext
from jaxllm.layers.linear import Linear
from jaxllm.layers.state import (
    ConvDrafts,
    KeptArray,
    StateConfig,
    StateOps,
    UnverifiedStates,
    last_inputs,
    of_drafts,
    on_shards,
)
from jaxllm.layers.taps import Taps
from jaxllm.parallel.sharding import Axes, Part

_CHANNELS: Axes = (None, "heads")


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec:
    """The static part of a layer's short convolution."""

    name: ClassVar[str] = "short_conv"
    num_channels: int
    width: int
    bias: bool = False  # of the convolution and of both projections

    @property
    def rope(self) -> None:
        return None

    def check(self, num_shards: int) -> None:
        """Raise ValidationError unless the channels can be cut into equal shards."""
        if self.num_channels % num_shards:
            raise refused(
                "tensor_parallel_size",
                num_shards,
                f"it does not divide the {self.num_channels} channels of the model's convolutions",
            )

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> "ShortConv":
        return ShortConv(self, hidden_size, num_shards=num_shards, dtype=dtype)


class ShortConv(nnx.Module):
    """out_proj(c * conv(b * x)), with b, c and x from one projection."""

    def __init__(self, spec: ShortConvSpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike):
        self.num_shards = num_shards
        part = Part(spec.num_channels)
        self.in_proj = Linear(
            hidden_size,
            3 * spec.num_channels,
            bias=spec.bias,
            axes=("heads", "hidden"),
            parts=(part, part, part),
            dtype=dtype,
        )
        self.conv = Taps(spec.num_channels, spec.width, parts=(part,), bias=spec.bias, dtype=dtype)
        self.out_proj = Linear(
            spec.num_channels, hidden_size, bias=spec.bias, axes=("hidden", "heads"), dtype=dtype
        )
        of_draft: Any = KeptArray((spec.num_channels,), jnp.dtype(dtype))
        self.config = StateConfig(
            arrays=(last_inputs(spec.width, spec.num_channels, dtype),),
            drafts=(ConvDrafts(of_draft),),
        )

    def __call__(self, x: jax.Array, cache: Cache, context: StepContext) -> tuple[jax.Array, Cache]:
        """Mix x [T, D]; return [T, D] and the states after the step."""
        assert isinstance(cache, tuple) and not isinstance(cache, LentCache)
        with jax.named_scope("short_conv"):
            shards = self.in_proj(x).reshape(len(x), self.num_shards, -1)
            b, c, x = (each.reshape(len(x), -1) for each in jnp.split(shards, 3, axis=2))
            bias = None if self.conv.bias is None else self.conv.bias[...]
            states = (None, *_CHANNELS)
            out, inputs, drafts = on_shards(
                functools.partial(_filter, context.state_ops),
                (b * x, self.conv.weight[...], bias, *cache, context.state_rows),
                (_CHANNELS, ("heads",), ("heads",), states, ()),
                (_CHANNELS, states, _CHANNELS),
                context.mesh,
            )
            return self.out_proj(c * out), UnverifiedStates.or_states((inputs,), drafts)


def _filter(
    ops: StateOps | None,
    x: jax.Array,
    taps: jax.Array,
    bias: jax.Array | None,
    inputs: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array, tuple[ConvDrafts, ...]]:
    """Run the op for the channels of a device: outputs [T, C], the states, and what the op got of
    drafts."""
    assert ops is not None, "the plan has no ops with states"
    out, inputs = ops.conv(x, taps.T, bias, inputs, rows, activation=None)
    drafts = () if rows.drafts is None else (ConvDrafts(*of_drafts(rows, x)),)
    return out, inputs, drafts
