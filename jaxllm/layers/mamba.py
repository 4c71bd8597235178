"""Mamba2: a matrix for each head in place of keys and values, which decays and is added to.

What is added and what reads it goes through a short convolution first. The outputs are gated and
normalised. Heads are cut over the shards with all that belongs to them. Heads of a group share
their vectors, so these are repeated if there are fewer groups than shards.
"""

import functools
import math
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
    Drafts,
    KeptArray,
    SsdDrafts,
    StateConfig,
    StateOps,
    States,
    UnverifiedStates,
    head_matrices,
    last_inputs,
    of_drafts,
    on_shards,
)
from jaxllm.layers.taps import Taps
from jaxllm.parallel.sharding import Axes, Part

_HEADS: Axes = (None, "heads")


@dataclass(frozen=True, kw_only=True)
class GatedNormSpec:
    """The static part of an RMSNorm of each group's outputs, beside their gates."""

    eps: float
    # Whether it normalises outputs before they are gated, not after.
    before_gate: bool = False


@dataclass(frozen=True, kw_only=True)
class MambaScales:
    """What multiplies the input, the five parts of its projection, and the output."""

    input: float = 1.0
    gate: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    step: float = 1.0
    output: float = 1.0


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    """The static part of a layer's Mamba2 mixer, for all heads together."""

    name: ClassVar[str] = "mamba"
    num_heads: int
    num_groups: int
    head_size: int
    state_size: int
    conv_width: int
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    norm: GatedNormSpec | None  # None: outputs are only gated
    # The shortest and the longest step of a token.
    step_limits: tuple[float, float] = (0.0, math.inf)
    scales: MambaScales = MambaScales()

    @property
    def rope(self) -> None:
        return None

    def check(self, num_shards: int) -> None:
        """Raise ValidationError unless the heads can be cut into equal shards."""
        if self.num_heads % num_shards:
            raise refused(
                "tensor_parallel_size",
                num_shards,
                f"it does not divide the {self.num_heads} heads of the model's Mamba2 mixers",
            )
        few, many = sorted((self.num_groups, num_shards))
        if many % few:
            raise refused(
                "tensor_parallel_size",
                num_shards,
                f"it is neither a divisor nor a multiple of the {self.num_groups} groups of the "
                "model's Mamba2 mixers",
            )

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> "Mamba":
        return Mamba(self, hidden_size, num_shards=num_shards, dtype=dtype)


class Mamba(nnx.Module):
    """Projections, a convolution, the state space, gates and a norm."""

    def __init__(self, spec: MambaSpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike):
        self.spec = spec
        self.num_shards = num_shards
        inner = spec.num_heads * spec.head_size
        copies = max(1, num_shards // spec.num_groups)
        vectors = Part(spec.num_groups * spec.state_size, copies)
        xbc = (Part(inner), vectors, vectors)
        parts = (Part(inner), *xbc, Part(spec.num_heads))
        # The rows of a shard of each of the parts.
        self.sizes = tuple(part.rows * part.copies // num_shards for part in parts)
        self.in_proj = Linear(
            hidden_size,
            sum(part.rows * part.copies for part in parts),
            bias=spec.in_bias,
            axes=("heads", "hidden"),
            parts=parts,
            dtype=dtype,
        )
        num_channels = sum(part.rows * part.copies for part in xbc)
        self.conv1d = Taps(
            num_channels, spec.conv_width, parts=xbc, bias=spec.conv_bias, dtype=dtype
        )
        # Some checkpoints have them in float32, since decays are sensitive to them.
        self.A_log, self.dt_bias, self.D = (
            nnx.Param(jnp.zeros(spec.num_heads, jnp.float32), axes=("heads",)) for _ in range(3)
        )
        self.norm = (
            None
            if spec.norm is None
            else GatedNorm(spec.norm, inner, num_groups=spec.num_groups, dtype=dtype)
        )
        self.out_proj = Linear(
            inner, hidden_size, bias=spec.out_bias, axes=("hidden", "heads"), dtype=dtype
        )
        of_conv: Any = KeptArray((num_channels,), jnp.dtype(dtype))
        of_heads: Any = (
            KeptArray((spec.num_heads, spec.head_size), jnp.dtype(dtype)),
            KeptArray((spec.num_groups * copies, spec.state_size), jnp.dtype(dtype)),
            KeptArray((spec.num_heads,), jnp.float32),
            KeptArray((spec.num_heads,), jnp.float32, is_shared=True),
        )
        self.config = StateConfig(
            arrays=(
                last_inputs(spec.conv_width, num_channels, dtype),
                head_matrices(spec.num_heads, spec.head_size, spec.state_size),
            ),
            drafts=(ConvDrafts(of_conv), SsdDrafts(*of_heads)),
        )

    def __call__(self, x: jax.Array, cache: Cache, context: StepContext) -> tuple[jax.Array, Cache]:
        """Mix x [T, D]; return [T, D] and the states after the step."""
        assert isinstance(cache, tuple) and not isinstance(cache, LentCache)
        scales, num_tokens = self.spec.scales, len(x)
        with jax.named_scope("mamba"):
            shards = self.in_proj(_scaled(x, scales.input)).reshape(num_tokens, self.num_shards, -1)
            ends = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes) - 1)]
            gate, *xbc, steps = (
                _scaled(part, scale)
                for part, scale in zip(
                    jnp.split(shards, ends, axis=2),
                    (scales.gate, scales.x, scales.b, scales.c, scales.step),
                    strict=True,
                )
            )
            per_token = (jnp.concatenate(xbc, axis=2), steps)
            bias = None if self.conv1d.bias is None else self.conv1d.bias[...]
            weights = (self.conv1d.weight, self.A_log, self.dt_bias, self.D)
            states = tuple((None, *array.axes) for array in self.config.arrays)
            out, after, drafts = on_shards(
                functools.partial(self._mix, context.state_ops),
                (
                    *(each.reshape(num_tokens, -1) for each in per_token),
                    bias,
                    *(weight[...] for weight in weights),
                    *cache,
                    context.state_rows,
                ),
                (_HEADS, _HEADS, *[("heads",)] * 5, *states, ()),
                (_HEADS, states, _HEADS),
                context.mesh,
            )
            gate = jax.nn.silu(gate.reshape(num_tokens, -1).astype(jnp.float32))
            out = out.reshape(num_tokens, -1)
            out = out * gate if self.norm is None else self.norm(out, gate)
            out = _scaled(self.out_proj(out.astype(x.dtype)), scales.output)
            return out, UnverifiedStates.or_states(after, drafts)

    def _mix(
        self,
        ops: StateOps | None,
        xbc: jax.Array,
        steps: jax.Array,
        bias: jax.Array | None,
        taps: jax.Array,
        log_rate: jax.Array,
        dt_bias: jax.Array,
        skip: jax.Array,
        inputs: jax.Array,
        matrices: jax.Array,
        rows: StateRows,
    ) -> tuple[jax.Array, States, tuple[Drafts, ...]]:
        """Run the ops for the heads of a device: outputs float32 [T, N, P], the states, and what
        the ops got of drafts."""
        spec = self.spec
        assert ops is not None, "the plan has no ops with states"
        num_tokens = len(xbc)
        entering = xbc
        xbc, inputs = ops.conv(xbc, taps.T, bias, inputs, rows, activation="silu")
        _, *sizes, _ = self.sizes
        x, b, c = (
            each.reshape(num_tokens, -1, size)
            for each, size in zip(
                jnp.split(xbc, [sizes[0], sizes[0] + sizes[1]], axis=1),
                (spec.head_size, spec.state_size, spec.state_size),
                strict=True,
            )
        )
        steps = jax.nn.softplus(steps.astype(jnp.float32) + dt_bias)
        if spec.step_limits != (0.0, math.inf):
            steps = jnp.clip(steps, *spec.step_limits)
        rate = -jnp.exp(log_rate)
        out, matrices = ops.ssd(x, b, c, steps, rate, matrices, rows)
        drafts: tuple[Drafts, ...] = ()
        if rows.drafts is not None:
            drafts = (
                ConvDrafts(*of_drafts(rows, entering)),
                SsdDrafts(*of_drafts(rows, x, b, steps), rate=rate[None]),
            )
        return out + skip[:, None] * x.astype(jnp.float32), (inputs, matrices), drafts


class GatedNorm(nnx.Module):
    """An RMSNorm of groups of outputs, with gates before or behind it; all in float32."""

    def __init__(self, spec: GatedNormSpec, size: int, *, num_groups: int, dtype: DTypeLike):
        self.spec = spec
        self.num_groups = num_groups
        self.weight = nnx.Param(jnp.ones(size, dtype), axes=("heads",))

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Normalise x and multiply it by its gate, float32 [T, inner] both."""
        if not self.spec.before_gate:
            x = x * gate
        groups = x.reshape(len(x), self.num_groups, -1)
        mean_square = jnp.mean(jnp.square(groups), axis=-1, keepdims=True)
        groups = groups * jax.lax.rsqrt(mean_square + self.spec.eps)
        x = groups.reshape(x.shape) * self.weight[...].astype(jnp.float32)
        return x * gate if self.spec.before_gate else x


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    return x if scale == 1.0 else (x.astype(jnp.float32) * scale).astype(x.dtype)
