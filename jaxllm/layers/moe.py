"""Mixture of experts: each token's weighted sum of a few feed-forward networks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxllm_kernels.experts.api import ExpertsConfig, ExpertsOp, ExpertWeights
from jaxllm_kernels.experts.xla import XLA_EXPERTS

from jaxllm.errors import refused
from jaxllm.layers.context import StepContext
from jaxllm.layers.linear import Linear
from jaxllm.layers.mlp import MLPSpec
from jaxllm.layers.router import Router, RouterSpec
from jaxllm.parallel.sharding import TENSOR, num_pieces, partition_spec


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """The static part of a layer's mixture of experts."""

    name: ClassVar[str] = "mlp"

    num_experts: int
    num_choices: int  # of each token
    intermediate_size: int  # of an expert
    router: RouterSpec
    bias: bool = False
    activation: ExpertsConfig = ExpertsConfig()
    # An MLP for all tokens, whose output is added.
    shared: MLPSpec | None = None
    # Whether the output of the shared MLP is multiplied by the sigmoid of a projection.
    gates_shared: bool = False
    # How experts are cut over devices: each device has some of them, or a part of each.
    has_whole_experts: bool = False
    # The size of the vectors that experts compute with, between two projections for all tokens;
    # None: that of hidden states.
    latent_size: int | None = None
    latent_bias: bool = False  # of the two projections

    def num_weights(self, hidden_size: int) -> int:
        """How many weights all experts have together."""
        matrices = self.activation.num_halves + 1
        size = self.intermediate_size * self.input_size(hidden_size)
        return matrices * self.num_experts * size

    def input_size(self, hidden_size: int) -> int:
        """The size of the vectors that experts compute with."""
        return self.latent_size or hidden_size

    def check(self, num_shards: int) -> None:
        name, size = "intermediate_size of an expert", self.intermediate_size
        if self.has_whole_experts:
            name, size = "number of experts", self.num_experts
        if size % num_shards:
            raise refused(
                "tensor_parallel_size", num_shards, f"it does not divide the model's {name}, {size}"
            )
        if self.shared is not None:
            self.shared.check(num_shards)

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> "MoE":
        return MoE(self, hidden_size, num_shards=num_shards, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class MoEBesideMLPSpec(MoESpec):
    """The static part of a mixture of experts in a layer that has an MLP as well."""

    name: ClassVar[str] = "moe"


class MoE(nnx.Module):
    """A router, experts and perhaps a shared MLP."""

    def __init__(self, spec: MoESpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike):
        self.num_experts = spec.num_experts
        self.gate = Router(
            spec.router, hidden_size, spec.num_experts, spec.num_choices, dtype=dtype
        )
        latent_size = spec.latent_size
        self.experts = Experts(spec, latent_size or hidden_size, dtype=dtype)
        # Their inputs and outputs are whole on every device, and so are they.
        self.fc1_latent_proj, self.fc2_latent_proj = (
            None if sizes is None else Linear(*sizes, bias=spec.latent_bias, dtype=dtype)
            for sizes in (
                (None, None)
                if latent_size is None
                else ((hidden_size, latent_size), (latent_size, hidden_size))
            )
        )
        self.shared_experts = (
            None
            if spec.shared is None
            else spec.shared.make(hidden_size, num_shards=num_shards, dtype=dtype)
        )
        self.shared_expert_gate = (
            Linear(hidden_size, 1, bias=False, axes=(None, "hidden"), dtype=dtype)
            if spec.gates_shared
            else None
        )

    def __call__(
        self, x: jax.Array, context: StepContext, *, routed_by: jax.Array | None = None
    ) -> jax.Array:
        """Compute the experts of x. The router chooses them by x, or by what is given for it."""
        with jax.named_scope("moe"):
            chosen, factors = self.gate.route(x if routed_by is None else routed_by)
            # Padding chooses no expert, so that it costs nothing.
            is_real = jnp.arange(len(x)) < context.num_tokens
            chosen = jnp.where(is_real[:, None], chosen, self.num_experts)
            if context.expert_tokens is not None:
                # Compared, not scattered: one small reduction on every platform.
                is_of = chosen[:, :, None] == jnp.arange(self.num_experts)
                counts = is_of.sum((0, 1), dtype=jnp.int32)
                context.expert_tokens[context.layer, : self.num_experts] = counts
            y = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
            y = self.experts(y, chosen, factors, context)
            if self.fc2_latent_proj is not None:
                y = self.fc2_latent_proj(y.astype(x.dtype))
            if self.shared_experts is not None:
                shared = self.shared_experts(x, context)
                if self.shared_expert_gate is not None:
                    gate = self.shared_expert_gate(x).astype(jnp.float32)
                    shared = shared.astype(jnp.float32) * jax.nn.sigmoid(gate)
                # In float32, or rounded once. Nothing is between two sums over devices and this
                # one, so that XLA may make one of them.
                y = y + shared
            return y.astype(x.dtype)


class Experts(nnx.Module):
    """The weights of all experts. The plan chooses the implementation, `op`."""

    op: ExpertsOp = XLA_EXPERTS

    def __init__(self, spec: MoESpec, hidden_size: int, *, dtype: DTypeLike):
        self.spec = spec
        count, size = spec.num_experts, spec.intermediate_size
        experts, inner = ("experts", None) if spec.has_whole_experts else (None, "mlp")

        def param(*shape: int, axes: tuple[str | None, ...]) -> nnx.Param:
            return nnx.Param(jnp.zeros(shape, dtype), axes=axes)

        halves = spec.activation.num_halves
        self.w13_weight = param(
            count, halves, size, hidden_size, axes=(experts, None, inner, "hidden")
        )
        self.w2_weight = param(count, hidden_size, size, axes=(experts, "hidden", inner))
        self.w13_bias = (
            param(count, halves, size, axes=(experts, None, inner)) if spec.bias else None
        )
        self.w2_bias = param(count, hidden_size, axes=(experts, "hidden")) if spec.bias else None

    def __call__(
        self, x: jax.Array, chosen: jax.Array, factors: jax.Array, context: StepContext
    ) -> jax.Array:
        """Return the sums [T, D] of the experts' outputs, of all devices together."""
        weights = self._weights(lambda param: param[...])
        mesh = context.mesh
        if mesh is None or num_pieces(mesh, ("mlp",)) == 1:
            return self.op(x, chosen, factors, weights, config=self.spec.activation)
        whole = partition_spec(())
        specs = self._weights(lambda param: partition_spec(param.get_metadata()["axes"]))
        return jax.shard_map(
            self._sum_of_devices,
            mesh=mesh,
            in_specs=(whole, whole, whole, specs),
            out_specs=whole,
            check_vma=False,
        )(x, chosen, factors, weights)

    def matrices(self, of: Callable[[nnx.Param], Any]) -> tuple[Any, Any]:
        """The matrices gate and up, and down, with a value of each parameter in its place."""
        return of(self.w13_weight), of(self.w2_weight)

    def _weights(self, of: Callable[[nnx.Param], Any]) -> ExpertWeights:
        biases = (None if its is None else of(its) for its in (self.w13_bias, self.w2_bias))
        return ExpertWeights(*self.matrices(of), *biases)

    def _sum_of_devices(
        self, x: jax.Array, chosen: jax.Array, factors: jax.Array, weights: ExpertWeights
    ) -> jax.Array:
        """Compute the share of one device, and add up all shares. The devices exchange them in the
        model's dtype, as they do for dense layers."""
        device = jax.lax.axis_index(TENSOR)
        if self.spec.has_whole_experts:
            # Experts of other devices have numbers outside of those here.
            chosen = chosen - device * weights.num_experts
        elif weights.down_bias is not None:
            # One device adds it.
            bias = jnp.where(device == 0, weights.down_bias, 0)
            weights = weights._replace(down_bias=bias)
        y = self.op(x, chosen, factors, weights, config=self.spec.activation)
        return jax.lax.psum(y.astype(x.dtype), TENSOR)
