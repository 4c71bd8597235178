"""InternViT as the tower of InternVL.

An image is some tiles, squares of one size, and each tile is seen by itself: its patches, behind a
class token, see all of their tile. They have learned positions, and nothing is rotated. What a
layer adds is scaled by learned factors. The patches of a square become a token.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.layers.activation import ACTIVATIONS
from jaxllm.layers.context import StepContext
from jaxllm.layers.linear import Linear
from jaxllm.layers.mlp import MLPSpec
from jaxllm.layers.norm import LayerNormSpec, NormSpec, RMSNormSpec
from jaxllm.layers.self_attention import SelfAttentionSpec
from jaxllm.layers.state import StateOps
from jaxllm.models.checkpoint_map import CheckpointMap, Place, Source, ViewedAs, concatenated
from jaxllm.models.family import read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture
from jaxllm.models.tower import Images, Seeing
from jaxllm.models.towers.layers import run_layer, tower_context

_CHANNELS = 3
_PROJECTOR_NORM = LayerNormSpec(eps=1e-5)
_MOST_MERGED = 8  # patches of a token's side


@dataclass(frozen=True, kw_only=True)
class InternVLSpec:
    """The static part of the tower; implements `jaxllm.models.tower.TowerSpec`."""

    processor: ClassVar[str] = "GotOcr2ImageProcessor"

    patch_size: int
    merge: int
    image_token_id: int
    marks: None = None
    video: None = None
    seeing: Seeing = "before"
    image_size: int
    size: int
    num_layers: int
    attention: SelfAttentionSpec
    mlp: MLPSpec
    norm: NormSpec
    final_norm: LayerNormSpec | None
    projector_activation: str

    @property
    def side(self) -> int:
        """The patches of a tile's side."""
        return self.image_size // self.patch_size

    @property
    def num_outputs(self) -> int:
        return 1

    def check(self, num_shards: int) -> None:
        self.attention.check(num_shards)
        self.mlp.check(num_shards)

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> "InternViT":
        return InternViT(self, hidden_size, num_shards=num_shards, dtype=dtype)

    def names(self, names: CheckpointMap) -> CheckpointMap:
        side = self.patch_size

        def convolution(place: Place) -> Source:
            ((rows, *columns),) = place.pieces
            module = f"{place.module}.projection"
            if not columns:
                return place.tensor(module, (rows,))
            tensor = place.plain_tensor(module, (rows, _CHANNELS, side, side))
            return ViewedAs(tensor, (rows, *columns))

        return names.with_rules(
            patch_embeddings=convolution,
            qkv_proj=concatenated("q_proj", "k_proj", "v_proj"),
        ).with_names(o_proj="projection_layer", up_proj="fc1", down_proj="fc2")


def read(config: HFConfig, architecture: Architecture) -> InternVLSpec:
    """Read the tower and what is between it and the decoder."""
    config = config.with_defaults(_DEFAULTS)
    vision = config.inside("vision_config").with_defaults(_VISION_DEFAULTS)
    vision.must_be("model_type", "internvl_vision")
    vision.must_be("num_channels", _CHANNELS)
    vision.must_be("use_absolute_position_embeddings", True)
    vision.must_be("use_mask_token", False)
    config.must_be("vision_feature_layer", -1)
    config.must_be("vision_feature_select_strategy", "default")
    size, num_heads = vision.integer("hidden_size"), vision.integer("num_attention_heads")
    image_size, patch_size = _edge(vision, "image_size"), _edge(vision, "patch_size")
    merge = _read_merge(config)
    if size % num_heads or image_size % (patch_size * merge):
        raise CheckpointError(
            f"config.json: image_size={image_size}, patch_size={patch_size} and 1 / "
            f"downsample_ratio={merge}, or hidden_size={size} and num_attention_heads={num_heads} "
            "in vision_config, do not divide each other"
        )
    eps = vision.positive("layer_norm_eps", 1e-6)
    qk_norm = RMSNormSpec(eps=1e-6) if vision.flag("use_qk_norm") else None
    return InternVLSpec(
        patch_size=patch_size,
        merge=merge,
        image_token_id=config.token_id("image_token_id", vocab_size=architecture.vocab_size),
        image_size=image_size,
        size=size,
        num_layers=vision.integer("num_hidden_layers"),
        attention=SelfAttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_size=size // num_heads,
            scale=(size // num_heads) ** -0.5,
            qkv_bias=vision.flag("attention_bias"),
            o_bias=True,
            qk_norm=qk_norm,
            norms_all_heads=True,
        ),
        mlp=read_mlp(vision, bias=True, is_gated=False),
        norm=_read_norm(vision, eps),
        final_norm=None if vision.flag("use_mean_pooling", True) else LayerNormSpec(eps=eps),
        projector_activation=_read_activation(config),
    )


# Of the classes in transformers.
_DEFAULTS = {
    "image_token_id": 151_667,
    "downsample_ratio": 0.5,
    "projector_hidden_act": "gelu",
}
_VISION_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "norm_type": "layer_norm",
}


def _edge(vision: HFConfig, name: str) -> int:
    """An edge of squares, which may stand twice."""
    value = vision.get(name)
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        vision = vision.replaced({name: value[0]})
    return vision.integer(name)


def _read_merge(config: HFConfig) -> int:
    ratio = config.positive("downsample_ratio", 0.5)
    merge = round(1 / ratio) if ratio > 1e-3 else 0
    if not 1 <= merge <= _MOST_MERGED or merge * ratio != 1:
        raise UnsupportedModelError(
            f"config.json: downsample_ratio={ratio} is not supported; supported is one divided by "
            f"a whole number up to {_MOST_MERGED}"
        )
    return merge


def _read_norm(vision: HFConfig, eps: float) -> NormSpec:
    vision.must_be("norm_type", "layer_norm", "rms_norm")
    is_rms = vision.get("norm_type") == "rms_norm"
    return RMSNormSpec(eps=eps) if is_rms else LayerNormSpec(eps=eps)


def _read_activation(config: HFConfig) -> str:
    name = config.get("projector_hidden_act")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"config.json: projector_hidden_act={shown(name)} is not supported; supported are "
            f"{', '.join(ACTIVATIONS)}"
        )
    return name


class InternViT(nnx.Module):
    """The tower, and what makes its outputs fit the decoder. Modules have their names in
    checkpoints."""

    def __init__(self, spec: InternVLSpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike):
        self.vision_tower = _Encoder(spec, num_shards=num_shards, dtype=dtype)
        self.multi_modal_projector = _Projector(spec, hidden_size, dtype=dtype)

    def __call__(self, images: Images, ops: StateOps, mesh: Mesh | None) -> jax.Array:
        return self.multi_modal_projector(self.vision_tower(images, ops, mesh))


class _Encoder(nnx.Module):
    def __init__(self, spec: InternVLSpec, *, num_shards: int, dtype: DTypeLike):
        self.dtype, self.side = dtype, spec.side
        self.embeddings = _Embeddings(spec, dtype=dtype)
        self.encoder = _Layers(spec, num_shards=num_shards, dtype=dtype)
        norm = spec.final_norm
        self.layernorm = None if norm is None else norm.make(spec.size, dtype=dtype)

    def __call__(self, images: Images, ops: StateOps, mesh: Mesh | None) -> jax.Array:
        """The states of patches [P, D], without those of the class tokens."""
        per_tile = self.side**2
        # Images are whole tiles, and so are the sizes for which this is compiled.
        num_tiles = len(images.pixels) // per_tile
        # The tiles of an image lie one below the other.
        rows, columns = images.places[:, 0] % self.side, images.places[:, 1]
        hidden = self.embeddings(images.pixels.astype(self.dtype), rows * self.side + columns)
        tiles = hidden.reshape(num_tiles, per_tile, -1)
        first = jnp.broadcast_to(self.embeddings.of_class(), (num_tiles, 1, tiles.shape[-1]))
        hidden = jnp.concatenate([first, tiles], axis=1).reshape(num_tiles * (per_tile + 1), -1)
        real = images.starts[-1] // per_tile
        starts = jnp.minimum(jnp.arange(num_tiles + 1), real) * (per_tile + 1)
        context = tower_context(starts, None, ops, mesh)
        for layer in self.encoder.layer:
            hidden = run_layer(layer, hidden, context)
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        tiles = hidden.reshape(num_tiles, per_tile + 1, -1)[:, 1:]
        return tiles.reshape(num_tiles * per_tile, -1)


class _Embeddings(nnx.Module):
    def __init__(self, spec: InternVLSpec, *, dtype: DTypeLike):
        numbers, num_places = _CHANNELS * spec.patch_size**2, spec.side**2 + 1
        self.patch_embeddings = Linear(numbers, spec.size, bias=True, dtype=dtype)
        axes = (None, None, "hidden")
        self.cls_token = nnx.Param(jnp.zeros((1, 1, spec.size), dtype), axes=axes)
        # The first is of the class token.
        self.position_embeddings = nnx.Param(
            jnp.zeros((1, num_places, spec.size), dtype), axes=axes
        )

    def __call__(self, pixels: jax.Array, places: jax.Array) -> jax.Array:
        return self.patch_embeddings(pixels) + self.position_embeddings[0, 1:][places]

    def of_class(self) -> jax.Array:
        """The embedding of the class token [1, 1, D]."""
        return self.cls_token[...] + self.position_embeddings[:, :1]


class _Layers(nnx.Module):
    def __init__(self, spec: InternVLSpec, *, num_shards: int, dtype: DTypeLike):
        self.layer = nnx.List(
            _Layer(spec, num_shards=num_shards, dtype=dtype) for _ in range(spec.num_layers)
        )


class _Layer(nnx.Module):
    def __init__(self, spec: InternVLSpec, *, num_shards: int, dtype: DTypeLike):
        size, how = spec.size, {"num_shards": num_shards, "dtype": dtype}
        self.layernorm_before, self.layernorm_after = (
            spec.norm.make(size, dtype=dtype) for _ in range(2)
        )
        self.attention: Any = spec.attention.make(size, **how)
        self.mlp: Any = spec.mlp.make(size, **how)
        self.lambda_1, self.lambda_2 = (
            nnx.Param(jnp.ones(size, dtype), axes=(None,)) for _ in range(2)
        )

    def __call__(self, hidden: jax.Array, context: StepContext) -> jax.Array:
        attended = self.attention(self.layernorm_before(hidden), (), context)[0]
        hidden = hidden + self.lambda_1[...] * attended
        return hidden + self.lambda_2[...] * self.mlp(self.layernorm_after(hidden), context)


class _Projector(nnx.Module):
    def __init__(self, spec: InternVLSpec, hidden_size: int, *, dtype: DTypeLike):
        self.size, self.activation = spec.size * spec.merge**2, spec.projector_activation
        self.layer_norm = _PROJECTOR_NORM.make(self.size, dtype=dtype)
        self.linear_1 = Linear(self.size, hidden_size, bias=True, dtype=dtype)
        self.linear_2 = Linear(hidden_size, hidden_size, bias=True, dtype=dtype)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        # The patches of a token are neighbours, and joined row by row.
        hidden = self.linear_1(self.layer_norm(hidden.reshape(-1, self.size)))
        passed = ACTIVATIONS[self.activation](hidden.astype(jnp.float32))
        return self.linear_2(passed.astype(hidden.dtype))
