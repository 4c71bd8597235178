"""The contract of a model: what the runner, the loader, the plan and the trainer ask of its class.

`DecoderForCausalLM` meets it for every family here; a class of a user's own may meet it otherwise.
"""

from typing import Protocol, Self

import jax
from jax.typing import DTypeLike
from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig

from jaxllm.layers.context import StepContext
from jaxllm.models.checkpoint_map import CheckpointMap
from jaxllm.models.part import ModelPart
from jaxllm.models.specs import Architecture


class Model(Protocol):
    """A flax nnx module whose Params are its weights.

    A Param says what its axes are (`axes`: names of `jaxllm.parallel.sharding`), what it is fused
    of (`parts`) and how many of its rows are no padding (`rows`). The module is traced by the
    runner and must not jit on its own account what depends on anything but its arguments.
    """

    @classmethod
    def abstract(
        cls,
        architecture: Architecture,
        dtype: DTypeLike,
        num_shards: int = 1,
        part: ModelPart | None = None,
    ) -> Self:
        """The model with shapes in place of weights, to be cut over so many devices; or a part of
        it, whose parameters have the names that they have in the whole."""
        ...

    @property
    def attention_configs(self) -> tuple[AttentionConfig, ...]:
        """What each attention of this part is on one shard: it has one cache for each of them, in
        this order."""
        ...

    @property
    def checkpoint_map(self) -> CheckpointMap:
        """Where its parameters are in a checkpoint."""
        ...

    @property
    def num_logits(self) -> int:
        """The width of the logits: the vocabulary and, in a model that is cut, padding."""
        ...

    def __call__(
        self,
        inputs: jax.Array,
        positions: jax.Array,
        caches: tuple[jax.Array, ...],
        context: StepContext,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Run a step's tokens [T] at positions [T] (in their sequences). The ids of padding are
        beyond every vocabulary, and what is made of them must be finite.

        Returns the hidden states [T, D] after the final norm, and the caches, updated. A part of a
        model takes the hidden states of the part before in place of token ids, and leaves those for
        the part after. A token's result depends on nothing but its own sequence.
        """
        ...

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [n, D] to float32 logits [n, V]; those of padding are -inf."""
        ...
