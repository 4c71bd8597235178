"""SigLIP as the tower of Gemma 3.

All images become squares of one size. Patches see all patches of their image, have learned
positions, and nothing is rotated. The mean of a square of patches becomes a token.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.layers.attention import AttentionSpec
from jaxllm.layers.context import StepContext
from jaxllm.layers.embedding import Positions
from jaxllm.layers.linear import Linear
from jaxllm.layers.mlp import MLPSpec
from jaxllm.layers.norm import LayerNormSpec, RMSNormSpec
from jaxllm.layers.self_attention import SelfAttentionSpec
from jaxllm.layers.state import StateOps
from jaxllm.models.checkpoint_map import (
    CheckpointMap,
    Place,
    Source,
    Transposed,
    ViewedAs,
    concatenated,
)
from jaxllm.models.family import read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture
from jaxllm.models.tower import Images, Seeing
from jaxllm.models.towers.layers import run_layer, tower_context

_CHANNELS = 3


@dataclass(frozen=True, kw_only=True)
class SiglipSpec:
    """The static part of the tower; implements `jaxllm.models.tower.TowerSpec`."""

    processor: ClassVar[str] = "Gemma3ImageProcessor"

    patch_size: int
    merge: int
    image_token_id: int
    marks: None = None
    video: None = None
    seeing: Seeing = "image"
    image_size: int
    size: int
    num_layers: int
    attention: SelfAttentionSpec
    mlp: MLPSpec
    norm: LayerNormSpec
    projector_norm: RMSNormSpec

    @property
    def side(self) -> int:
        """The patches of an image's side."""
        return self.image_size // self.patch_size

    @property
    def num_outputs(self) -> int:
        return 1

    def check(self, num_shards: int) -> None:
        self.attention.check(num_shards)
        self.mlp.check(num_shards)

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> "Siglip":
        return Siglip(self, hidden_size, num_shards=num_shards, dtype=dtype)

    def names(self, names: CheckpointMap) -> CheckpointMap:
        side = self.patch_size

        def convolution(place: Place) -> Source:
            ((rows, *columns),) = place.pieces
            if not columns:
                return place.tensor(place.module, (rows,))
            tensor = place.plain_tensor(place.module, (rows, _CHANNELS, side, side))
            return ViewedAs(tensor, (rows, *columns))

        def projection(place: Place) -> Source:
            ((rows, columns),) = place.pieces
            name = f"{place.module}_{place.leaf}"  # a parameter of the projector itself
            tensor = place.plain_tensor("", (columns, rows))
            return Transposed(dataclasses.replace(tensor, name=f"{place.parent}.{name}"))

        return names.with_rules(
            patch_embedding=convolution,
            mm_input_projection=projection,
            qkv_proj=concatenated("q_proj", "k_proj", "v_proj"),
        ).with_names(o_proj="out_proj", up_proj="fc1", down_proj="fc2")


def read(config: HFConfig, architecture: Architecture) -> SiglipSpec:
    """Read the tower and what is between it and the decoder."""
    vision = config.inside("vision_config").with_defaults(_DEFAULTS)
    vision.must_be("model_type", "siglip_vision_model")
    vision.must_be("num_channels", _CHANNELS)
    size, num_heads = vision.integer("hidden_size"), vision.integer("num_attention_heads")
    image_size, patch_size = vision.integer("image_size"), vision.integer("patch_size")
    num_tokens = config.integer("mm_tokens_per_image", 256)
    merge = round((image_size // patch_size) / num_tokens**0.5)
    if size % num_heads or merge * round(num_tokens**0.5) * patch_size != image_size:
        raise CheckpointError(
            f"config.json: image_size={image_size}, patch_size={patch_size} and "
            f"mm_tokens_per_image={num_tokens}, or hidden_size={size} and "
            f"num_attention_heads={num_heads} in vision_config, do not divide each other"
        )
    mixers = [mixer for layer in architecture.layers for mixer in layer.mixers]
    windows = [its.window for its in mixers if isinstance(its, AttentionSpec) and its.window]
    if any(window < num_tokens for window in windows):
        # transformers lets the tokens of an image see each other wherever a window ends.
        raise UnsupportedModelError(
            f"config.json: sliding_window={min(windows)} is below "
            f"mm_tokens_per_image={num_tokens}, which is not supported; start with "
            "language_model_only=True for prompts of text"
        )
    eps = vision.positive("layer_norm_eps", 1e-6)
    return SiglipSpec(
        patch_size=patch_size,
        merge=merge,
        image_token_id=config.token_id(
            "image_token_index", 262_144, vocab_size=architecture.vocab_size
        ),
        image_size=image_size,
        size=size,
        num_layers=vision.integer("num_hidden_layers"),
        attention=SelfAttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_size=size // num_heads,
            scale=(size // num_heads) ** -0.5,
            qkv_bias=True,
            o_bias=True,
        ),
        mlp=read_mlp(vision, bias=True, is_gated=False),
        norm=LayerNormSpec(eps=eps),
        projector_norm=RMSNormSpec(eps=eps, offset=1.0, rounds_first=False),
    )


# Of the class in transformers.
_DEFAULTS = {
    "model_type": "siglip_vision_model",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
}


class Siglip(nnx.Module):
    """The tower, and what makes its outputs fit the decoder. Modules have their names in
    checkpoints."""

    def __init__(self, spec: SiglipSpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike):
        self.vision_tower = _Encoder(spec, num_shards=num_shards, dtype=dtype)
        self.multi_modal_projector = _Projector(spec, hidden_size, dtype=dtype)

    def __call__(self, images: Images, ops: StateOps, mesh: Mesh | None) -> jax.Array:
        return self.multi_modal_projector(self.vision_tower(images, ops, mesh))


class _Encoder(nnx.Module):
    def __init__(self, spec: SiglipSpec, *, num_shards: int, dtype: DTypeLike):
        self.dtype, self.side = dtype, spec.side
        self.embeddings = _Embeddings(spec, dtype=dtype)
        self.encoder = _Layers(spec, num_shards=num_shards, dtype=dtype)
        self.post_layernorm = spec.norm.make(spec.size, dtype=dtype)

    def __call__(self, images: Images, ops: StateOps, mesh: Mesh | None) -> jax.Array:
        hidden = self.embeddings.patch_embedding(images.pixels.astype(self.dtype))
        places = images.places[:, 0] * self.side + images.places[:, 1]
        hidden = hidden + self.embeddings.position_embedding(places)
        context = tower_context(images.starts, None, ops, mesh)
        for layer in self.encoder.layers:
            hidden = run_layer(layer, hidden, context)
        return self.post_layernorm(hidden)


class _Embeddings(nnx.Module):
    def __init__(self, spec: SiglipSpec, *, dtype: DTypeLike):
        numbers = _CHANNELS * spec.patch_size**2
        self.patch_embedding = Linear(numbers, spec.size, bias=True, dtype=dtype)
        self.position_embedding = Positions(spec.side**2, spec.size, dtype=dtype)


class _Layers(nnx.Module):
    def __init__(self, spec: SiglipSpec, *, num_shards: int, dtype: DTypeLike):
        self.layers = nnx.List(
            _Layer(spec, num_shards=num_shards, dtype=dtype) for _ in range(spec.num_layers)
        )


class _Layer(nnx.Module):
    def __init__(self, spec: SiglipSpec, *, num_shards: int, dtype: DTypeLike):
        size, how = spec.size, {"num_shards": num_shards, "dtype": dtype}
        self.layer_norm1, self.layer_norm2 = (spec.norm.make(size, dtype=dtype) for _ in range(2))
        self.self_attn: Any = spec.attention.make(size, **how)
        self.mlp: Any = spec.mlp.make(size, **how)

    def __call__(self, hidden: jax.Array, context: StepContext) -> jax.Array:
        hidden = hidden + self.self_attn(self.layer_norm1(hidden), (), context)[0]
        return hidden + self.mlp(self.layer_norm2(hidden), context)


class _Projector(nnx.Module):
    def __init__(self, spec: SiglipSpec, hidden_size: int, *, dtype: DTypeLike):
        self.num_merged = spec.merge**2
        self.mm_soft_emb_norm = spec.projector_norm.make(spec.size, dtype=dtype)
        self.mm_input_projection = Linear(spec.size, hidden_size, bias=False, dtype=dtype)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        squares = hidden.reshape(-1, self.num_merged, hidden.shape[-1])
        return self.mm_input_projection(self.mm_soft_emb_norm(squares.mean(axis=1)))
