"""What a model computes, in small frozen records: one spec for each layer, and the `Architecture`.

A spec is static and hashable. It checks whether its module can be sharded, and makes the module.
The specs of mixers, ffns and norms are beside their modules in `jaxllm.layers`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import jax
from jax.typing import DTypeLike

from jaxllm.errors import ValidationError
from jaxllm.layers.context import Cache, StepContext
from jaxllm.layers.moe import MoESpec
from jaxllm.layers.norm import NormSpec
from jaxllm.layers.per_layer_input import PerLayerInputSpec
from jaxllm.layers.rope import RopeConfig
from jaxllm.layers.self_attention import SelfAttentionSpec
from jaxllm.models.pooling_head import PoolingHeadSpec
from jaxllm.models.tower import TowerSpec
from jaxllm.quantization.products import Products
from jaxllm.quantization.scheme import Scheme

Caches = tuple[Cache, ...]  # of a layer: one for each mixer


class FFN(Protocol):
    """Computes each token alone: x [T, D] -> [T, D]."""

    def __call__(self, x: jax.Array, context: StepContext) -> jax.Array: ...


class Mixer(Protocol):
    """Mixes the tokens of each sequence: x [T, D] -> [T, D] and the updated cache."""

    def __call__(
        self, x: jax.Array, cache: Cache, context: StepContext
    ) -> tuple[jax.Array, Cache]: ...


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
        """The rotary embedding that the mixer needs in `StepContext.rotary`."""
        ...

    def check(self, num_shards: int) -> None:
        """Raise ValidationError if the module cannot be cut into so many equal shards."""
        ...

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> Mixer: ...


class Layer(Protocol):
    """Mixers and ffns around the residual stream [T, D]."""

    @property
    def spec(self) -> "LayerSpec": ...

    # Whether it takes, and may return, a stream to which an output is still to be added.
    leaves_sums: ClassVar[bool]

    def __call__(self, hidden: Any, caches: Caches, context: StepContext) -> tuple[Any, Caches]:
        """Return the residual stream after the layer, and the layer's updated caches."""
        ...


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What a layer computes, and how it is wired to the residual stream."""

    # The outputs of all mixers are added up, and so are those of all ffns.
    mixers: tuple[MixerSpec, ...]
    ffns: tuple[FFNSpec, ...]
    norm: NormSpec  # of all norms of the block
    block: Callable[..., Layer]  # a class of `jaxllm.models.blocks`
    residual_scale: float = 1.0  # of what is added to the residual stream
    # The earlier layer whose caches this one uses; None: it has a cache for each of its mixers.
    caches_of: int | None = None
    # Its own input for each token, in blocks that take one.
    per_layer_input: PerLayerInputSpec | None = None

    @property
    def rope(self) -> RopeConfig | None:
        return next((mixer.rope for mixer in self.mixers if mixer.rope is not None), None)

    def check(self, num_shards: int) -> None:
        """Raise ValidationError if the layer cannot be cut into so many equal shards."""
        for part in (*self.mixers, *self.ffns):
            part.check(num_shards)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What a config.json says about the computation; hashable and static."""

    name: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None  # None: the last layer leaves normal states
    tie_word_embeddings: bool
    # What multiplies embeddings. It is rounded to their dtype first, as the models were trained.
    embedding_scale: float = 1.0
    # The rows of a table of learned positions, which are added to the embeddings; None: no table.
    num_positions: int | None = None
    first_position: int = 0  # the row of a text's first token
    # The types of tokens, which have embeddings, too. An id of the type t is the token's own plus
    # t times the size of the vocabulary.
    num_token_types: int = 0
    embedding_norm: NormSpec | None = None  # of the sum of a token's embeddings
    # Logits are multiplied by the scale, then become soft_cap * tanh(logits / soft_cap).
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
    has_head_bias: bool = False
    # What is behind a pooled hidden state, in place of logits; None: the model generates.
    pooling_head: PoolingHeadSpec | None = None
    tower: TowerSpec | None = None  # what makes embeddings of images; None: prompts are text
    max_model_len: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    # Which weights are codes; None: none.
    scheme: Scheme | None = None
    # The whole config.json, for users' models with fields of their own.
    hf_config: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def image_width(self) -> int:
        """The size of what the tower makes for a token."""
        return self.hidden_size * (1 if self.tower is None else self.tower.num_outputs)

    @property
    def per_layer_input(self) -> PerLayerInputSpec | None:
        """What all layers have in common of their own inputs, if they have any."""
        return self.layers[0].per_layer_input

    @property
    def is_encoder(self) -> bool:
        """Whether tokens see those behind them."""
        mixers = [mixer for layer in self.layers for mixer in layer.mixers]
        return any(isinstance(mixer, SelfAttentionSpec) for mixer in mixers)

    @property
    def num_experts(self) -> dict[int, int]:
        """The number of experts of each layer that has some, by the layer's index."""
        return {
            index: ffn.num_experts
            for index, layer in enumerate(self.layers)
            for ffn in layer.ffns
            if isinstance(ffn, MoESpec)
        }

    def with_products(self, products: Products) -> "Architecture":
        """The architecture with a choice of implementations for weights that are codes."""
        if self.scheme is None:
            return self
        return replace(self, scheme=replace(self.scheme, products=products))

    def check(self, num_shards: int) -> None:
        """Raise ValidationError if the model cannot be cut into so many equal shards."""
        for layer in dict.fromkeys(self.layers):
            layer.check(num_shards)

    def cuts_tower(self, num_shards: int) -> bool:
        """Whether the tower can be cut as well; otherwise every device computes all of it."""
        try:
            if self.tower is not None:
                self.tower.check(num_shards)
        except ValidationError:
            return False
        return True
