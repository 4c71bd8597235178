"""How a layer's mixers and ffns are wired to the residual stream: one class for each wiring.

`norms` lists a block's norms in the order of their use, under their names in checkpoints.
"""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.context import StepContext
from jaxllm.layers.norm import Norm
from jaxllm.layers.residual import Stream, join, normalise
from jaxllm.models.specs import Caches, LayerSpec


class Block(nnx.Module):
    """Makes the modules that the spec lists, under their names.

    A subclass wires them in `__call__`, and so implements `Layer`.
    """

    norms: ClassVar[tuple[str, ...]]
    # Whether it begins and ends with a stream to which the last output may not be added yet.
    leaves_sums: ClassVar[bool] = False

    def __init__(self, spec: LayerSpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike):
        self.spec = spec
        for name in self.norms:
            setattr(self, name, spec.norm.make(hidden_size, dtype=dtype))
        for part in (*spec.mixers, *spec.ffns):
            module = part.make(hidden_size, num_shards=num_shards, dtype=dtype)
            setattr(self, part.name, module)
        if spec.per_layer_input is not None:
            self.per_layer_input = spec.per_layer_input.make(hidden_size, dtype=dtype)

    def mix(self, x: jax.Array, caches: Caches, context: StepContext) -> tuple[jax.Array, Caches]:
        """Return the sum of the mixers' outputs for x, and the updated caches."""
        outputs, updated = [], []
        for spec, cache in zip(self.spec.mixers, caches, strict=True):
            output, cache = getattr(self, spec.name)(x, cache, context)
            outputs.append(output)
            updated.append(cache)
        return functools.reduce(jnp.add, outputs), tuple(updated)

    def feed(self, x: jax.Array, context: StepContext) -> jax.Array:
        """Return the sum of the ffns' outputs for x."""
        outputs = [getattr(self, spec.name)(x, context) for spec in self.spec.ffns]
        return functools.reduce(jnp.add, outputs)

    def add(self, hidden: jax.Array, *outputs: jax.Array) -> jax.Array:
        """Add outputs to the residual stream, scaled if the spec says so."""
        scale = self.spec.residual_scale
        for output in outputs:
            if scale != 1.0:  # which is not rounded to 16 bits
                output = (output.astype(jnp.float32) * scale).astype(output.dtype)
            hidden = hidden + output
        return hidden

    def join(self, hidden: jax.Array, output: jax.Array, context: StepContext) -> Stream:
        """Add an output to the residual stream, or leave that to the next norm."""
        if self.spec.residual_scale != 1.0:
            return self.add(hidden, output)
        return join(hidden, output, context)

    def norm(self, name: str) -> Norm:
        return getattr(self, name)


class PreNormBlock(Block):
    """A norm before the mixers, and another before the ffns."""

    norms = ("input_layernorm", "post_attention_layernorm")
    leaves_sums: ClassVar[bool] = True

    def __call__(
        self, hidden: Stream, caches: Caches, context: StepContext
    ) -> tuple[Stream, Caches]:
        before_mixers, before_ffns = map(self.norm, self.norms)
        hidden, x = normalise(hidden, before_mixers, context)
        mixed, caches = self.mix(x, caches, context)
        hidden, x = normalise(self.join(hidden, mixed, context), before_ffns, context)
        return self.join(hidden, self.feed(x, context), context), caches


class SingleBlock(Block):
    """Mixers or ffns, not both, behind one norm."""

    norms = ("input_layernorm",)
    leaves_sums: ClassVar[bool] = True

    def __call__(
        self, hidden: Stream, caches: Caches, context: StepContext
    ) -> tuple[Stream, Caches]:
        hidden, x = normalise(hidden, self.norm(self.norms[0]), context)
        if self.spec.ffns:
            return self.join(hidden, self.feed(x, context), context), caches
        mixed, caches = self.mix(x, caches, context)
        return self.join(hidden, mixed, context), caches


class InnerNormBlock(Block):
    """A norm before the ffns only: the stream that enters is normal already."""

    norms = ("post_attention_layernorm",)

    def __call__(
        self, hidden: jax.Array, caches: Caches, context: StepContext
    ) -> tuple[jax.Array, Caches]:
        mixed, caches = self.mix(hidden, caches, context)
        hidden = self.add(hidden, mixed)
        x = self.norm(self.norms[0])(hidden)
        return self.add(hidden, self.feed(x, context)), caches


class PostNormBlock(Block):
    """A norm after the mixers and another after the ffns; none before them."""

    norms = ("post_attention_layernorm", "post_feedforward_layernorm")

    def __call__(
        self, hidden: jax.Array, caches: Caches, context: StepContext
    ) -> tuple[jax.Array, Caches]:
        behind_mixers, behind_ffns = map(self.norm, self.norms)
        mixed, caches = self.mix(hidden, caches, context)
        hidden = self.add(hidden, behind_mixers(mixed))
        return self.add(hidden, behind_ffns(self.feed(hidden, context))), caches


class ResidualNormBlock(Block):
    """A norm of the sum of the stream and the mixers' output, and another of the sum with the ffns'
    output. So the stream itself is normalised, as in BERT."""

    norms = ("post_attention_layernorm", "post_feedforward_layernorm")

    def __call__(
        self, hidden: jax.Array, caches: Caches, context: StepContext
    ) -> tuple[jax.Array, Caches]:
        behind_mixers, behind_ffns = map(self.norm, self.norms)
        mixed, caches = self.mix(hidden, caches, context)
        hidden = behind_mixers(self.add(hidden, mixed))
        return behind_ffns(self.add(hidden, self.feed(hidden, context))), caches


class SandwichBlock(Block):
    """A norm before and after the mixers, and before and after the ffns."""

    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def __call__(
        self, hidden: jax.Array, caches: Caches, context: StepContext
    ) -> tuple[jax.Array, Caches]:
        before_mixers, behind_mixers, *_ = map(self.norm, self.norms)
        mixed, caches = self.mix(before_mixers(hidden), caches, context)
        hidden = self.add(hidden, behind_mixers(mixed))
        return self.add(hidden, self.feed_from(hidden, context)), caches

    def feed_from(self, hidden: jax.Array, context: StepContext) -> jax.Array:
        """What the ffns make of the residual stream, between their norms."""
        _, _, before_ffns, behind_ffns = map(self.norm, self.norms)
        return behind_ffns(self.feed(before_ffns(hidden), context))


class ScaledSandwichBlock(SandwichBlock):
    """A sandwich. Then the layer adds what it makes of its own input for each token, if it has one,
    and multiplies everything by a stored scalar."""

    def __init__(self, spec: LayerSpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike):
        super().__init__(spec, hidden_size, num_shards=num_shards, dtype=dtype)
        self.layer_scalar = nnx.Param(jnp.ones(1, dtype), axes=(None,))

    def __call__(
        self, hidden: jax.Array, caches: Caches, context: StepContext
    ) -> tuple[jax.Array, Caches]:
        hidden, caches = super().__call__(hidden, caches, context)
        if self.spec.per_layer_input is not None:
            hidden = self.add(hidden, self.per_layer_input(hidden, context))
        return hidden * self.layer_scalar[...], caches


class ExpertsSandwichBlock(ScaledSandwichBlock):
    """A scaled sandwich with experts beside the MLP. Both have norms of their own before and after,
    and the router sees the stream itself."""

    norms = (
        *ScaledSandwichBlock.norms,
        "post_feedforward_layernorm_1",
        "pre_feedforward_layernorm_2",
        "post_feedforward_layernorm_2",
    )

    def feed_from(self, hidden: jax.Array, context: StepContext) -> jax.Array:
        _, _, before_mlp, behind, behind_mlp, before_experts, behind_experts = map(
            self.norm, self.norms
        )
        mlp, moe = (getattr(self, spec.name) for spec in self.spec.ffns)
        of_mlp = behind_mlp(mlp(before_mlp(hidden), context))
        of_experts = moe(before_experts(hidden), context, routed_by=hidden)
        return behind(of_mlp + behind_experts(of_experts))


class TwoNormParallelBlock(Block):
    """A norm for the mixers and another for the ffns. Neither sees the outputs of the other."""

    norms = ("input_layernorm", "post_attention_layernorm")

    def __call__(
        self, hidden: jax.Array, caches: Caches, context: StepContext
    ) -> tuple[jax.Array, Caches]:
        before_mixers, before_ffns = map(self.norm, self.norms)
        mixed, caches = self.mix(before_mixers(hidden), caches, context)
        return self.add(hidden, mixed, self.feed(before_ffns(hidden), context)), caches


class ParallelBlock(Block):
    """One norm for both mixers and ffns. Neither sees the outputs of the other."""

    norms = ("input_layernorm",)

    def __call__(
        self, hidden: jax.Array, caches: Caches, context: StepContext
    ) -> tuple[jax.Array, Caches]:
        x = self.norm(self.norms[0])(hidden)
        mixed, caches = self.mix(x, caches, context)
        return self.add(hidden, mixed, self.feed(x, context)), caches
