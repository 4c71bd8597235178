"""The tower of Qwen3-VL, and that of Qwen3.5.

Patches see all of their image. A square of learned positions is stretched over the image and added
to its patches, which are rotated by rows and columns, too. In Qwen3-VL, what some layers leave is
merged as the result is: these vectors are added to the tokens behind the first layers of the
decoder. Qwen3.5 has only the result.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllm.errors import CheckpointError, shown
from jaxllm.layers.activation import ACTIVATIONS
from jaxllm.layers.context import StepContext
from jaxllm.layers.embedding import Positions
from jaxllm.layers.linear import Linear
from jaxllm.layers.mlp import MLPSpec
from jaxllm.layers.norm import LayerNormSpec
from jaxllm.layers.self_attention import SelfAttentionSpec
from jaxllm.layers.state import StateOps
from jaxllm.models.checkpoint_map import CheckpointMap
from jaxllm.models.family import read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture
from jaxllm.models.tower import Images, Seeing, VideoTokens
from jaxllm.models.towers.layers import rotated_in_quarters, run_layer, tower_context
from jaxllm.models.towers.qwen_patches import (
    CHANNELS,
    FRAMES,
    of_two_frames,
    patch_weights,
    read_heads,
    read_rope_theta,
    read_video,
)

_NORM = LayerNormSpec(eps=1e-6)


@dataclass(frozen=True, kw_only=True)
class Qwen3TowerSpec:
    """The static part of the tower; implements `jaxllm.models.tower.TowerSpec`."""

    processor: ClassVar[str] = "Qwen2VLImageProcessor"

    patch_size: int
    merge: int
    image_token_id: int
    marks: None = None
    video: VideoTokens
    seeing: Seeing = "before"
    size: int
    num_layers: int
    attention: SelfAttentionSpec
    mlp: MLPSpec
    rope_theta: float
    side: int  # of the square of learned positions
    tapped: tuple[int, ...]  # layers whose results are merged, too

    @property
    def image_size(self) -> None:
        return None

    @property
    def num_outputs(self) -> int:
        return 1 + len(self.tapped)

    def check(self, num_shards: int) -> None:
        self.attention.check(num_shards)
        self.mlp.check(num_shards)

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> "Qwen3Tower":
        return Qwen3Tower(self, hidden_size, num_shards=num_shards, dtype=dtype)

    def names(self, names: CheckpointMap) -> CheckpointMap:
        return names.with_rules(patch_conv=patch_weights(self.patch_size)).with_names(
            qkv_proj="qkv",
            o_proj="proj",
            up_proj="linear_fc1",
            down_proj="linear_fc2",
        )


def read(config: HFConfig, architecture: Architecture) -> Qwen3TowerSpec:
    """Read the tower of Qwen3-VL, and what is between it and the decoder."""
    vision = config.inside("vision_config").with_defaults(_DEFAULTS)
    of_layers = _read_tapped(vision, architecture)
    return _read(config, vision, architecture, "qwen3_vl", tapped=of_layers, ids=_IDS)


def read_without_taps(config: HFConfig, architecture: Architecture) -> Qwen3TowerSpec:
    """Read the tower of Qwen3.5, and what is between it and the decoder."""
    config.must_be("language_model_only", False)
    vision = config.inside("vision_config").with_defaults(_DEFAULTS)
    vision.must_be("deepstack_visual_indexes", [], ())
    return _read(config, vision, architecture, "qwen3_5", tapped=(), ids=_IDS_OF_3_5)


def _read_tapped(vision: HFConfig, architecture: Architecture) -> tuple[int, ...]:
    """The layers of the tower whose results are merged, too."""
    tapped = vision.get("deepstack_visual_indexes", (8, 16, 24))
    is_list = isinstance(tapped, list | tuple) and all(type(index) is int for index in tapped)
    if (
        not is_list
        or sorted(set(tapped)) != list(tapped)
        or not all(0 <= index < vision.integer("depth") for index in tapped)
        or len(tapped) > architecture.num_layers
    ):
        raise CheckpointError(
            f"config.json: deepstack_visual_indexes={shown(tapped)} must be layers of the tower in "
            "their order, and no more than the decoder has"
        )
    return tuple(tapped)


def _read(
    config: HFConfig,
    vision: HFConfig,
    architecture: Architecture,
    kind: str,
    *,
    tapped: tuple[int, ...],
    ids: tuple[int, int, int, int],
) -> Qwen3TowerSpec:
    """Read what both towers have; `kind` begins the types of the model."""
    # Older files have the type of the whole model here.
    kinds = [f"{kind}{experts}{part}" for experts in ("", "_moe") for part in ("_vision", "")]
    vision.must_be("model_type", *kinds)
    for name, value in (
        ("in_channels", CHANNELS),
        ("temporal_patch_size", FRAMES),
        ("out_hidden_size", architecture.hidden_size),
    ):
        vision.must_be(name, value)
    size, vocab_size = vision.integer("hidden_size"), architecture.vocab_size
    num_positions = vision.integer("num_position_embeddings")
    side = round(num_positions**0.5)
    if side * side != num_positions:
        raise CheckpointError(
            f"config.json: num_position_embeddings={num_positions} is not the area of a square"
        )
    return Qwen3TowerSpec(
        patch_size=vision.integer("patch_size"),
        merge=vision.integer("spatial_merge_size"),
        image_token_id=config.token_id("image_token_id", ids[0], vocab_size=vocab_size),
        video=read_video(config, ids[1:], vocab_size=vocab_size, positions_per_second=None),
        size=size,
        num_layers=vision.integer("depth"),
        attention=read_heads(vision, size),
        mlp=read_mlp(vision, bias=True, is_gated=False),
        rope_theta=read_rope_theta(vision),
        side=side,
        tapped=tapped,
    )


# The usual tokens of images, of videos, and those before and behind either.
_IDS = 151_655, 151_656, 151_652, 151_653
_IDS_OF_3_5 = 248_056, 248_057, 248_053, 248_054

# Of the class in transformers.
_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
}
# For the tiny checkpoints in tests.
TINY = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],
    "out_hidden_size": 64,
}


class Qwen3Tower(nnx.Module):
    """The tower, and what makes its outputs fit the decoder. Modules have their names in
    checkpoints."""

    def __init__(
        self, spec: Qwen3TowerSpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike
    ):
        self.visual = _Encoder(spec, hidden_size, num_shards=num_shards, dtype=dtype)

    def __call__(self, images: Images, ops: StateOps, mesh: Mesh | None) -> jax.Array:
        return self.visual(images, ops, mesh)


class _Encoder(nnx.Module):
    def __init__(
        self, spec: Qwen3TowerSpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike
    ):
        self.spec = spec
        self.dtype = dtype
        numbers = CHANNELS * FRAMES * spec.patch_size**2
        self.patch_conv = Linear(numbers, spec.size, bias=True, dtype=dtype)
        self.pos_embed = Positions(spec.side**2, spec.size, dtype=dtype)
        self.blocks = nnx.List(
            _Layer(spec, num_shards=num_shards, dtype=dtype) for _ in range(spec.num_layers)
        )
        self.merger = _Merger(spec, hidden_size, joins_first=False, dtype=dtype)
        self.deepstack_merger_list = nnx.List(
            _Merger(spec, hidden_size, joins_first=True, dtype=dtype) for _ in spec.tapped
        )

    def __call__(self, images: Images, ops: StateOps, mesh: Mesh | None) -> jax.Array:
        spec = self.spec
        rotary = rotated_in_quarters(spec.attention.head_size, spec.rope_theta, images.places)
        context = tower_context(images.starts, rotary, ops, mesh)
        frames = of_two_frames(images.pixels, spec.patch_size)
        hidden = self.patch_conv(frames.astype(self.dtype))
        hidden = hidden + self._learned(images).astype(hidden.dtype)
        merged = []
        for index, layer in enumerate(self.blocks):
            hidden = run_layer(layer, hidden, context)
            if index in spec.tapped:
                merger = self.deepstack_merger_list[spec.tapped.index(index)]
                merged.append(merger(hidden))
        return jnp.concatenate([self.merger(hidden), *merged], axis=1)

    def _learned(self, images: Images) -> jax.Array:
        """The learned positions of patches, f32 [P, D]: each is between four of the square."""
        side, starts = self.spec.side, images.starts
        index = jnp.arange(len(images.places))
        image = jnp.searchsorted(starts[1:], index, side="right", method="compare_all")
        last = jax.ops.segment_max(images.places, image, len(starts))[image]
        # The corners of the square are those of the image.
        at = images.places.astype(jnp.float32) * ((side - 1) / jnp.maximum(last, 1))
        at = jnp.clip(at, 0, side - 1)
        low = jnp.floor(at).astype(jnp.int32)
        high, share = jnp.minimum(low + 1, side - 1), at - low
        total = jnp.zeros((len(at), self.spec.size), jnp.float32)
        for rows, by_rows in ((low[:, 0], 1 - share[:, 0]), (high[:, 0], share[:, 0])):
            for columns, by_columns in ((low[:, 1], 1 - share[:, 1]), (high[:, 1], share[:, 1])):
                learned = self.pos_embed(rows * side + columns).astype(jnp.float32)
                total += learned * (by_rows * by_columns)[:, None]
        return total


class _Layer(nnx.Module):
    def __init__(self, spec: Qwen3TowerSpec, *, num_shards: int, dtype: DTypeLike):
        size, how = spec.size, {"num_shards": num_shards, "dtype": dtype}
        self.norm1, self.norm2 = (_NORM.make(size, dtype=dtype) for _ in range(2))
        self.attn: Any = spec.attention.make(size, **how)
        self.mlp: Any = spec.mlp.make(size, **how)

    def __call__(self, hidden: jax.Array, context: StepContext) -> jax.Array:
        hidden = hidden + self.attn(self.norm1(hidden), (), context)[0]
        return hidden + self.mlp(self.norm2(hidden), context)


class _Merger(nnx.Module):
    """Makes one vector for the decoder of the patches of a token. They are joined before or behind
    the norm."""

    def __init__(
        self, spec: Qwen3TowerSpec, hidden_size: int, *, joins_first: bool, dtype: DTypeLike
    ):
        self.size, self.joins_first = spec.size * spec.merge**2, joins_first
        self.norm = _NORM.make(self.size if joins_first else spec.size, dtype=dtype)
        self.linear_fc1 = Linear(self.size, self.size, bias=True, dtype=dtype)
        self.linear_fc2 = Linear(self.size, hidden_size, bias=True, dtype=dtype)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        if self.joins_first:
            hidden = hidden.reshape(-1, self.size)
        joined = self.linear_fc1(self.norm(hidden).reshape(-1, self.size))
        passed = ACTIVATIONS["gelu"](joined.astype(jnp.float32))
        return self.linear_fc2(passed.astype(hidden.dtype))
