"""A gated delta net, as in Qwen3-Next: a matrix for each head in place of keys and values.

Queries, keys and values go through a short convolution. Then the gated delta rule adds them to the
matrices and reads these. Heads are cut over the shards with all that belongs to them.
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxllm_kernels.recurrent.rows import StateRows
from jaxllm_kernels.row_sums.api import RowSums

from jaxllm.errors import refused
from jaxllm.layers.context import Cache, LentCache, StepContext
from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import NormSpec
from jaxllm.layers.state import (
    ConvDrafts,
    DeltaDrafts,
    Drafts,
    KeptArray,
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
# What keeps the length of a key from being zero.
_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec:
    """The static part of a layer's gated delta net, for all heads together."""

    name: ClassVar[str] = "linear_attn"
    num_key_heads: int  # of queries, too
    num_heads: int  # of values; each has a matrix
    key_size: int
    value_size: int
    conv_width: int
    norm: NormSpec  # of each head's output, before its gate
    # How much of what is held of a key a token can correct: above one, beyond its value.
    beta_scale: float = 1.0

    @property
    def rope(self) -> None:
        return None

    def check(self, num_shards: int) -> None:
        """Raise ValidationError unless the heads can be cut into equal shards."""
        if self.num_key_heads % num_shards:
            raise refused(
                "tensor_parallel_size",
                num_shards,
                f"it does not divide the model's linear_num_key_heads={self.num_key_heads}",
            )

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> "GatedDeltaNet":
        return GatedDeltaNet(self, hidden_size, num_shards=num_shards, dtype=dtype)


class GatedDeltaNet(nnx.Module):
    """Projections, a convolution, the gated delta rule, a norm with a gate."""

    def __init__(
        self, spec: GatedDeltaSpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike
    ):
        self.spec = spec
        self.num_shards = num_shards
        keys, values = spec.num_key_heads * spec.key_size, spec.num_heads * spec.value_size
        num_channels = 2 * keys + values
        heads = (Part(spec.num_heads),)
        qkv = (Part(keys), Part(keys), Part(values))

        def linear(*parts: Part) -> Linear:
            return Linear(
                hidden_size,
                sum(part.rows for part in parts),
                bias=False,
                axes=("heads", "hidden"),
                parts=parts,
                dtype=dtype,
            )

        self.in_proj_qkvz = linear(*qkv, Part(values))
        self.in_proj_ba = linear(*heads, *heads)
        self.conv1d = Taps(num_channels, spec.conv_width, parts=qkv, bias=False, dtype=dtype)
        # Some checkpoints have them in float32, since decays are sensitive to them.
        self.A_log, self.dt_bias = (
            nnx.Param(jnp.zeros(spec.num_heads, jnp.float32), axes=("heads",)) for _ in range(2)
        )
        self.norm = spec.norm.make(spec.value_size, dtype=dtype)
        self.out_proj = Linear(
            values, hidden_size, bias=False, axes=("hidden", "heads"), dtype=dtype
        )
        self.config = StateConfig(
            arrays=(
                last_inputs(spec.conv_width, num_channels, dtype),
                head_matrices(spec.num_heads, spec.key_size, spec.value_size),
            ),
            drafts=kept_by_delta(
                num_channels,
                keys=(spec.num_key_heads, spec.key_size),
                values=(spec.num_heads, spec.value_size),
                decays=(spec.num_heads,),
                dtype=dtype,
            ),
        )

    def __call__(self, x: jax.Array, cache: Cache, context: StepContext) -> tuple[jax.Array, Cache]:
        """Mix x [T, D]; return [T, D] and the states after the step."""
        assert isinstance(cache, tuple) and not isinstance(cache, LentCache)
        spec, num_tokens = self.spec, len(x)
        with jax.named_scope("gated_delta"):
            shards = self.in_proj_qkvz(x).reshape(num_tokens, self.num_shards, -1)
            num_gates = spec.num_heads * spec.value_size // self.num_shards
            qkv, gates = jnp.split(shards, [shards.shape[2] - num_gates], axis=2)
            shards = self.in_proj_ba(x).reshape(num_tokens, self.num_shards, -1)
            b, a = jnp.split(shards, 2, axis=2)
            per_token = (each.reshape(num_tokens, -1) for each in (qkv, b, a))
            weights = self.conv1d.weight[...], self.A_log[...], self.dt_bias[...]
            states = tuple((None, *array.axes) for array in self.config.arrays)
            out, after, drafts = on_shards(
                functools.partial(self._mix, context.state_ops),
                (*per_token, *weights, *cache, context.state_rows),
                (*[_HEADS] * 3, *[("heads",)] * 3, *states, ()),
                (_HEADS, states, _HEADS),
                context.mesh,
            )
            gates = gates.reshape(num_tokens, spec.num_heads, -1).astype(jnp.float32)
            out = self.norm(out.astype(x.dtype)) * jax.nn.silu(gates)
            out = self.out_proj(out.astype(x.dtype).reshape(num_tokens, -1))
            return out, UnverifiedStates.or_states(after, drafts)

    def _mix(
        self,
        ops: StateOps | None,
        qkv: jax.Array,
        b: jax.Array,
        a: jax.Array,
        taps: jax.Array,
        log_rate: jax.Array,
        dt_bias: jax.Array,
        inputs: jax.Array,
        matrices: jax.Array,
        rows: StateRows,
    ) -> tuple[jax.Array, States, tuple[Drafts, ...]]:
        """Run the ops for the heads of a device: outputs float32 [T, N, V], the states, and what
        the ops got of drafts."""
        step = jax.nn.softplus(a.astype(jnp.float32) + dt_bias)
        beta = self.spec.beta_scale * jax.nn.sigmoid(b.astype(jnp.float32))
        log_decay = -jnp.exp(log_rate) * step
        return run_delta(
            ops, qkv, taps, log_decay, beta, inputs, matrices, rows, key_size=self.spec.key_size
        )


def kept_by_delta(
    num_channels: int,
    *,
    keys: tuple[int, int],
    values: tuple[int, int],
    decays: tuple[int, ...],
    dtype: DTypeLike,
) -> tuple[Drafts, ...]:
    """What `run_delta` keeps of a draft: `KeptArray`s. `keys`, `values` and `decays` are sizes over
    all shards, heads first."""
    of_conv: Any = KeptArray((num_channels,), jnp.dtype(dtype))
    of_rule: Any = (
        KeptArray(keys, jnp.float32),
        KeptArray(values, jnp.dtype(dtype)),
        KeptArray(decays, jnp.float32),
        KeptArray(values[:1], jnp.float32),
    )
    return ConvDrafts(of_conv), DeltaDrafts(*of_rule)


def run_delta(
    ops: StateOps | None,
    qkv: jax.Array,
    taps: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    inputs: jax.Array,
    matrices: jax.Array,
    rows: StateRows,
    *,
    key_size: int,
) -> tuple[jax.Array, States, tuple[Drafts, ...]]:
    """Run the convolution and the delta rule for the heads of a device: outputs float32 [T, N, V],
    the states, and what the ops got of drafts. `qkv` is [T, C], `beta` [T, N]."""
    assert ops is not None, "the plan has no ops with states"
    num_heads, value_size = matrices.shape[1], matrices.shape[3]
    keys = (qkv.shape[1] - num_heads * value_size) // 2
    entering = qkv
    qkv, inputs = ops.conv(qkv, taps.T, None, inputs, rows, activation="silu")
    q, k, v = (
        each.reshape(len(qkv), -1, size)
        for each, size in zip(
            jnp.split(qkv, [keys, 2 * keys], axis=1), (key_size, key_size, value_size), strict=True
        )
    )
    q, k = _of_length_one(q, ops.row_sums) * key_size**-0.5, _of_length_one(k, ops.row_sums)
    out, matrices = ops.delta(q, k, v, log_decay, beta, matrices, rows)
    drafts: tuple[Drafts, ...] = ()
    if rows.drafts is not None:
        drafts = (
            ConvDrafts(*of_drafts(rows, entering)),
            DeltaDrafts(*of_drafts(rows, k, v, log_decay, beta)),
        )
    return out, (inputs, matrices), drafts


def _of_length_one(x: jax.Array, row_sums: RowSums | None) -> jax.Array:
    x = x.astype(jnp.float32)
    if row_sums is None:
        squares = jnp.square(x).sum(axis=-1, keepdims=True)
    else:
        squares = row_sums.squares(x)[..., None]
    return x * jax.lax.rsqrt(squares + _EPS)
