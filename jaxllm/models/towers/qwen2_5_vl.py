"""The tower of Qwen2.5-VL.

In most layers, patches see those of their window, a square of tokens. In the others they see all of
their image. Patches are put in the order of windows for all layers, so that both are rows.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllm.errors import CheckpointError, shown
from jaxllm.layers.activation import ACTIVATIONS
from jaxllm.layers.context import StepContext
from jaxllm.layers.linear import Linear
from jaxllm.layers.mlp import MLPSpec
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.layers.self_attention import SelfAttentionSpec
from jaxllm.layers.state import StateOps
from jaxllm.models.checkpoint_map import CheckpointMap, concatenated
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

_NORM = RMSNormSpec(eps=1e-6)


@dataclass(frozen=True, kw_only=True)
class QwenTowerSpec:
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
    window: int  # the side of a window in tokens
    full_layers: tuple[int, ...]  # those whose patches see all of their image

    @property
    def image_size(self) -> None:
        return None

    @property
    def num_outputs(self) -> int:
        return 1

    def check(self, num_shards: int) -> None:
        self.attention.check(num_shards)
        self.mlp.check(num_shards)

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> "QwenTower":
        return QwenTower(self, hidden_size, num_shards=num_shards, dtype=dtype)

    def names(self, names: CheckpointMap) -> CheckpointMap:
        return names.with_rules(
            patch_conv=patch_weights(self.patch_size),
            gate_up_proj=concatenated("gate_proj", "up_proj"),
        ).with_names(qkv_proj="qkv", o_proj="proj", fc1="mlp.0", fc2="mlp.2")


def read(config: HFConfig, architecture: Architecture) -> QwenTowerSpec:
    """Read the tower and what is between it and the decoder."""
    vision = config.inside("vision_config").with_defaults(_DEFAULTS)
    for name, value in (
        ("model_type", "qwen2_5_vl_vision"),
        ("in_channels", CHANNELS),
        ("in_chans", CHANNELS),
        ("temporal_patch_size", FRAMES),
        ("out_hidden_size", architecture.hidden_size),
    ):
        vision.must_be(name, value, *(("qwen2_5_vl",) if name == "model_type" else ()))
    patch_size, merge = vision.integer("patch_size"), vision.integer("spatial_merge_size")
    vision.must_be("spatial_patch_size", patch_size)
    full = vision.get("fullatt_block_indexes")
    if not isinstance(full, list | tuple) or not all(type(index) is int for index in full):
        raise CheckpointError(
            f"config.json: fullatt_block_indexes={shown(full)} must be a list of numbers"
        )
    size = vision.integer("hidden_size")
    num_layers = vision.integer("depth")
    return QwenTowerSpec(
        patch_size=patch_size,
        merge=merge,
        image_token_id=config.token_id(
            "image_token_id", 151_655, vocab_size=architecture.vocab_size
        ),
        video=read_video(
            config,
            (151_656, 151_652, 151_653),
            vocab_size=architecture.vocab_size,
            positions_per_second=vision.integer("tokens_per_second"),
        ),
        size=size,
        num_layers=num_layers,
        attention=read_heads(vision, size),
        mlp=read_mlp(vision, bias=True),
        rope_theta=read_rope_theta(vision),
        window=max(1, vision.integer("window_size") // (patch_size * merge)),
        full_layers=tuple(sorted({index for index in full if 0 <= index < num_layers})),
    )


# Of the class in transformers.
_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
    "tokens_per_second": 4,
}


class Windows(NamedTuple):
    """The tokens of images, window by window."""

    order: jax.Array  # i32 [U]: which token stands at each place
    starts: jax.Array  # i32 [W + 1]: the windows, as `Images.starts` has images, but in tokens


def windows_of(images: Images, merge: int, side: int) -> Windows:
    """Cut images into windows of `side` tokens. Padding stays behind all of them."""
    per_token = merge**2
    places, starts = images.places[::per_token] // merge, images.starts // per_token
    num_tokens, num_images = len(places), len(starts) - 1
    index = jnp.arange(num_tokens)
    image = jnp.searchsorted(starts[1:], index, side="right", method="compare_all")
    is_real = image < num_images
    rows, columns = places[:, 0] // side, places[:, 1] // side
    num_columns = jax.ops.segment_max(columns, image, num_images + 1) + 1
    # An image has no more windows than tokens, so windows of different images have other numbers.
    first = starts[jnp.minimum(image, num_images)]
    window = jnp.where(is_real, first + rows * num_columns[image] + columns, num_tokens)
    order = jnp.argsort(window, stable=True)
    sorted_windows = window[order]
    begins = (sorted_windows != jnp.roll(sorted_windows, 1)) & is_real
    begins = begins.at[0].set(is_real[0])
    # An image of r x c tokens has at most (r * c + side - 1) / side windows.
    most = min(num_tokens, num_tokens // side + num_images)
    ends = starts[-1:]
    (begin,) = jnp.nonzero(begins, size=most, fill_value=ends[0])
    return Windows(order, jnp.concatenate([begin, ends]).astype(jnp.int32))


class QwenTower(nnx.Module):
    """The tower, and what makes its outputs fit the decoder. Modules have their names in
    checkpoints."""

    def __init__(self, spec: QwenTowerSpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike):
        self.visual = _Encoder(spec, hidden_size, num_shards=num_shards, dtype=dtype)

    def __call__(self, images: Images, ops: StateOps, mesh: Mesh | None) -> jax.Array:
        return self.visual(images, ops, mesh)


class _Encoder(nnx.Module):
    def __init__(self, spec: QwenTowerSpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike):
        self.spec = spec
        self.dtype = dtype
        numbers = CHANNELS * FRAMES * spec.patch_size**2
        self.patch_conv = Linear(numbers, spec.size, bias=False, dtype=dtype)
        self.blocks = nnx.List(
            _Layer(spec, num_shards=num_shards, dtype=dtype) for _ in range(spec.num_layers)
        )
        self.merger = _Merger(spec, hidden_size, dtype=dtype)

    def __call__(self, images: Images, ops: StateOps, mesh: Mesh | None) -> jax.Array:
        spec = self.spec
        per_token = spec.merge**2
        windows = windows_of(images, spec.merge, spec.window)

        def in_windows(of_patches: jax.Array) -> jax.Array:
            of_tokens = of_patches.reshape(-1, per_token, of_patches.shape[-1])
            return of_tokens[windows.order].reshape(of_patches.shape)

        rotary = rotated_in_quarters(
            spec.attention.head_size, spec.rope_theta, in_windows(images.places)
        )
        whole, cut = (
            tower_context(starts, rotary, ops, mesh)
            for starts in (images.starts, windows.starts * per_token)
        )
        frames = of_two_frames(images.pixels, spec.patch_size)
        hidden = in_windows(self.patch_conv(frames.astype(self.dtype)))
        for index, layer in enumerate(self.blocks):
            hidden = run_layer(layer, hidden, whole if index in spec.full_layers else cut)
        merged = self.merger(hidden)
        return jnp.zeros_like(merged).at[windows.order].set(merged)


class _Layer(nnx.Module):
    def __init__(self, spec: QwenTowerSpec, *, num_shards: int, dtype: DTypeLike):
        size, how = spec.size, {"num_shards": num_shards, "dtype": dtype}
        self.norm1, self.norm2 = (_NORM.make(size, dtype=dtype) for _ in range(2))
        self.attn: Any = spec.attention.make(size, **how)
        self.mlp: Any = spec.mlp.make(size, **how)

    def __call__(self, hidden: jax.Array, context: StepContext) -> jax.Array:
        hidden = hidden + self.attn(self.norm1(hidden), (), context)[0]
        return hidden + self.mlp(self.norm2(hidden), context)


class _Merger(nnx.Module):
    def __init__(self, spec: QwenTowerSpec, hidden_size: int, *, dtype: DTypeLike):
        self.size = spec.size * spec.merge**2
        self.ln_q = _NORM.make(spec.size, dtype=dtype)
        self.fc1 = Linear(self.size, self.size, bias=True, dtype=dtype)
        self.fc2 = Linear(self.size, hidden_size, bias=True, dtype=dtype)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        joined = self.fc1(self.ln_q(hidden).reshape(-1, self.size))
        passed = ACTIVATIONS["gelu"](joined.astype(jnp.float32))
        return self.fc2(passed.astype(hidden.dtype))
