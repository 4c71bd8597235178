"""What a model is, as sums of small frozen records: a spec for each layer, and what is around them.

A spec is static and hashable, says which sizes may be cut how, and makes its module. The specs of
mixers, ffns and norms stand beside their modules in `jaxllm.layers`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jax
from jax.typing import DTypeLike

from jaxllm.layers.context import StepContext
from jaxllm.layers.norm import NormSpec
from jaxllm.layers.rope import RopeConfig

if TYPE_CHECKING:
    from jaxllm.models.blocks import Block


class FFN(Protocol):
    """Looks at each token alone: x [T, D] -> [T, D]."""

    def __call__(self, x: jax.Array, context: StepContext) -> jax.Array: ...


class Mixer(Protocol):
    """Lets tokens of a sequence see each other: x [T, D] -> [T, D], and its cache, updated."""

    def __call__(
        self, x: jax.Array, cache: jax.Array, context: StepContext
    ) -> tuple[jax.Array, jax.Array]: ...


class FFNSpec(Protocol):
    """What is static about an ffn."""

    name: ClassVar[str]  # of the module in its layer

    def check(self, num_shards: int) -> None:
        """Raise ValidationError if the module cannot be cut into so many equal shards."""
        ...

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> FFN: ...


class MixerSpec(Protocol):
    """What is static about a mixer."""

    name: ClassVar[str]  # of the module in its layer

    @property
    def rope(self) -> RopeConfig | None:
        """The rotations that it wants in `StepContext.rotary`."""
        ...

    def check(self, num_shards: int) -> None:
        """Raise ValidationError if the module cannot be cut into so many equal shards."""
        ...

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> Mixer: ...


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A layer: what it computes, and how that is wired to the residual stream."""

    # The outputs of several in one place are added up.
    mixers: tuple[MixerSpec, ...]
    ffns: tuple[FFNSpec, ...]
    norm: NormSpec  # of every place where the block has one
    block: type["Block"]
    residual_scale: float = 1.0  # of what is added to the residual stream

    @property
    def rope(self) -> RopeConfig | None:
        return next((mixer.rope for mixer in self.mixers if mixer.rope is not None), None)

    def check(self, num_shards: int) -> None:
        """Raise ValidationError if the layer cannot be cut into so many equal shards."""
        for part in (*self.mixers, *self.ffns):
            part.check(num_shards)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """All that a config.json says about the computation; hashable and static."""

    name: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    tie_word_embeddings: bool
    max_model_len: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    # What it was read from, for models from outside with fields of their own.
    hf_config: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def check(self, num_shards: int) -> None:
        """Raise ValidationError if the model cannot be cut into so many equal shards."""
        for layer in dict.fromkeys(self.layers):
            layer.check(num_shards)
