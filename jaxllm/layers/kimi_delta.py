"""Kimi delta attention: a gated delta net in which each channel of a key decays by itself.

Decays and the gates of outputs come from projections of low rank. Queries, keys and values have a
head of the same size. Heads are cut over the shards with all that belongs to them; the small
projections before the gates are whole on every shard.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxllm_kernels.recurrent.rows import StateRows

from jaxllm.errors import refused
from jaxllm.layers.context import Cache, LentCache, StepContext
from jaxllm.layers.gated_delta import kept_by_delta, run_delta
from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import NormSpec
from jaxllm.layers.state import (
    Drafts,
    StateConfig,
    StateOps,
    States,
    UnverifiedStates,
    head_matrices,
    last_inputs,
    on_shards,
)
from jaxllm.layers.taps import Taps
from jaxllm.parallel.sharding import Axes, Part

_HEADS: Axes = (None, "heads")


@dataclass(frozen=True, kw_only=True)
class KimiDeltaSpec:
    """The static part of a layer's Kimi delta attention, for all heads together."""

    name: ClassVar[str] = "self_attn"
    num_heads: int
    head_size: int
    conv_width: int
    norm: NormSpec  # of each head's output, before its gate

    @property
    def rope(self) -> None:
        return None

    def check(self, num_shards: int) -> None:
        """Raise ValidationError unless the heads can be cut into equal shards."""
        if self.num_heads % num_shards:
            raise refused(
                "tensor_parallel_size",
                num_shards,
                f"it does not divide the {self.num_heads} heads of the model's linear attention",
            )

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> "KimiDeltaAttention":
        return KimiDeltaAttention(self, hidden_size, num_shards=num_shards, dtype=dtype)


class KimiDeltaAttention(nnx.Module):
    """Projections, a convolution, the gated delta rule, a norm with a gate."""

    def __init__(self, spec: KimiDeltaSpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike):
        self.spec = spec
        self.num_shards = num_shards
        size = spec.num_heads * spec.head_size
        qkv = (Part(size), Part(size), Part(size))

        def linear(inputs: int, outputs: int, axes: Axes, *parts: Part) -> Linear:
            return Linear(inputs, outputs, bias=False, axes=axes, parts=parts, dtype=dtype)

        self.qkv_proj = linear(hidden_size, 3 * size, ("heads", "hidden"), *qkv)
        self.b_proj = linear(hidden_size, spec.num_heads, ("heads", "hidden"))
        low = Part(spec.head_size)
        self.fused_fg_a_proj = linear(hidden_size, 2 * spec.head_size, (None, "hidden"), low, low)
        self.f_b_proj = linear(spec.head_size, size, ("heads", None))
        self.g_b_proj = linear(spec.head_size, size, ("heads", None))
        self.conv1d = Taps(3 * size, spec.conv_width, parts=qkv, bias=False, dtype=dtype)
        # Checkpoints have them in float32, since decays are sensitive to them.
        self.A_log, self.dt_bias = (
            nnx.Param(jnp.zeros(count, jnp.float32), axes=("heads",))
            for count in (spec.num_heads, size)
        )
        self.o_norm = spec.norm.make(spec.head_size, dtype=dtype)
        self.o_proj = linear(size, hidden_size, ("hidden", "heads"))
        self.config = StateConfig(
            arrays=(
                last_inputs(spec.conv_width, 3 * size, dtype),
                head_matrices(spec.num_heads, spec.head_size, spec.head_size),
            ),
            drafts=kept_by_delta(
                3 * size,
                keys=(spec.num_heads, spec.head_size),
                values=(spec.num_heads, spec.head_size),
                decays=(spec.num_heads, spec.head_size),
                dtype=dtype,
            ),
        )

    def __call__(self, x: jax.Array, cache: Cache, context: StepContext) -> tuple[jax.Array, Cache]:
        """Mix x [T, D]; return [T, D] and the states after the step."""
        assert isinstance(cache, tuple) and not isinstance(cache, LentCache)
        with jax.named_scope("kimi_delta"):
            of_decays, of_gates = jnp.split(self.fused_fg_a_proj(x), 2, axis=-1)
            decays, gates = self.f_b_proj(of_decays), self.g_b_proj(of_gates)
            weights = self.conv1d.weight[...], self.A_log[...], self.dt_bias[...]
            states = tuple((None, *array.axes) for array in self.config.arrays)
            out, after, drafts = on_shards(
                functools.partial(self._mix, context.state_ops),
                (self.qkv_proj(x), self.b_proj(x), decays, *weights, *cache, context.state_rows),
                (*[_HEADS] * 3, *[("heads",)] * 3, *states, ()),
                (_HEADS, states, _HEADS),
                context.mesh,
            )
            gates = jax.nn.sigmoid(gates.reshape(out.shape).astype(jnp.float32))
            # The norm is of float32, too, and is rounded behind the gate.
            out = self.o_norm(out.astype(x.dtype).astype(jnp.float32)) * gates
            out = self.o_proj(out.astype(x.dtype).reshape(len(x), -1))
            return out, UnverifiedStates.or_states(after, drafts)

    def _mix(
        self,
        ops: StateOps | None,
        qkv: jax.Array,
        b: jax.Array,
        decays: jax.Array,
        taps: jax.Array,
        log_rate: jax.Array,
        dt_bias: jax.Array,
        inputs: jax.Array,
        matrices: jax.Array,
        rows: StateRows,
    ) -> tuple[jax.Array, States, tuple[Drafts, ...]]:
        """Run the ops for the heads of a device, as `run_delta` says."""
        size = self.spec.head_size
        step = jax.nn.softplus(decays.astype(jnp.float32) + dt_bias)
        log_decay = -jnp.exp(log_rate)[:, None] * step.reshape(len(step), -1, size)
        beta = jax.nn.sigmoid(b.astype(jnp.float32))
        return run_delta(ops, qkv, taps, log_decay, beta, inputs, matrices, rows, key_size=size)
