"""The contract of a model: what the runner, the loader, the plan and the trainer need of its class.

`DecoderForCausalLM` implements it for every family here. Users may register classes of their own.
"""

from typing import Protocol, Self

import jax
from jax.typing import DTypeLike

from jaxllm.layers.context import Cache, MixerConfig, StepContext
from jaxllm.layers.state import StateConfig
from jaxllm.models.checkpoint_map import CheckpointMap
from jaxllm.models.part import ModelPart
from jaxllm.models.specs import Architecture


class Model(Protocol):
    """A flax nnx module whose Params are its weights.

    A Param has metadata: `axes` names its axes (see `jaxllm.parallel.sharding`), `parts` lists the
    tensors that are fused in it, `rows` counts its rows without padding, and `columns` its columns.
    The runner traces the module. The module may jit only functions that depend on nothing but their
    arguments.
    """

    @classmethod
    def abstract(
        cls,
        architecture: Architecture,
        dtype: DTypeLike,
        num_shards: int = 1,
        part: ModelPart | None = None,
    ) -> Self:
        """Make the model, or a part of it, with shapes in place of weights, for `num_shards`
        devices. The parameters of a part have the same names as in the whole model."""
        ...

    @property
    def attention_configs(self) -> tuple[MixerConfig, ...]:
        """The attention of each mixer on one shard, except those that use the cache of another
        layer. A model has one cache for each, in this order."""
        ...

    @property
    def state_configs(self) -> tuple[StateConfig, ...]:
        """The states of mixers without attention. Behind the caches of attentions, a model has the
        arrays of each of these, in this order."""
        ...

    @property
    def checkpoint_map(self) -> CheckpointMap:
        """The places of the parameters in a checkpoint."""
        ...

    @property
    def num_logits(self) -> int:
        """The width of the logits: the vocabulary and, in a model that is sharded, padding. 0 in a
        model that pools and makes none."""
        ...

    def __call__(
        self,
        inputs: jax.Array,
        positions: jax.Array,
        caches: tuple[Cache, ...],
        context: StepContext,
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """Run a step's tokens [T] at positions [T] in their sequences.

        Return the hidden states [T, D] after the final norm, and the updated caches. In a model of
        several parts, a part takes the hidden states of the previous part in place of token ids,
        and returns its own for the next part. A token's result depends only on its own sequence.
        Padding has token ids beyond every vocabulary; its hidden states must be finite.
        """
        ...

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        """Compute float32 logits [n, V] from hidden states [n, D]; padding columns are -inf."""
        ...


class PoolingModel(Model, Protocol):
    """A model that can be run by an engine that pools."""

    def project(self, pooled: jax.Array) -> jax.Array:
        """Turn pooled hidden states, f32 [n, D], into vectors, f32 [n, K]: for an architecture with
        a `pooling_head`."""
        ...
