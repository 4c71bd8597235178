"""The tower of Pixtral and Mistral 3.

Patches see all patches of their image. The pairs of a head that are rotated by the row of a patch
and those that are rotated by its column take turns in their frequencies. Squares of patches become
one token.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllm.errors import UnsupportedModelError, shown
from jaxllm.layers.activation import ACTIVATIONS
from jaxllm.layers.context import StepContext
from jaxllm.layers.linear import Linear
from jaxllm.layers.mlp import MLPSpec
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.layers.rope import RopeConfig, Rotary, inverse_frequencies
from jaxllm.layers.self_attention import SelfAttentionSpec
from jaxllm.layers.state import StateOps
from jaxllm.models.checkpoint_map import CheckpointMap, Place, Source, ViewedAs
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture
from jaxllm.models.tower import Images, Seeing
from jaxllm.models.towers.layers import run_layer, tower_context

_NORM = RMSNormSpec(eps=1e-5)
_CHANNELS = 3
_LLAVA = "LlavaForConditionalGeneration"  # that of Pixtral 12B


@dataclass(frozen=True, kw_only=True)
class PixtralSpec:
    """The static part of the tower; implements `jaxllm.models.tower.TowerSpec`."""

    processor: ClassVar[str] = "PixtralImageProcessor"

    patch_size: int
    merge: int
    image_token_id: int
    marks: None = None
    video: None = None
    seeing: Seeing = "before"
    size: int
    num_layers: int
    attention: SelfAttentionSpec
    mlp: MLPSpec
    rope: RopeConfig
    projector_norm: RMSNormSpec | None  # None: there is none, and no merger
    projector_activation: str
    projector_bias: bool

    @property
    def image_size(self) -> None:
        return None

    @property
    def num_outputs(self) -> int:
        return 1

    def check(self, num_shards: int) -> None:
        self.attention.check(num_shards)
        self.mlp.check(num_shards)

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> "Pixtral":
        return Pixtral(self, hidden_size, num_shards=num_shards, dtype=dtype)

    def names(self, names: CheckpointMap) -> CheckpointMap:
        side = self.patch_size

        def convolution(place: Place) -> Source:
            ((rows, columns),) = place.pieces
            tensor = place.plain_tensor(place.module, (rows, _CHANNELS, side, side))
            return ViewedAs(tensor, (rows, columns))

        def of_layout(its: CheckpointMap) -> CheckpointMap:
            # transformers writes all parts of the model inside "model".
            before = "model" if its.renamed["model"].startswith("model.") else ""
            its = its.with_rules(patch_conv=convolution).with_names(tower=before)
            return dataclasses.replace(its, ignored=(), others=())

        first, *others = map(of_layout, (names, *names.others))
        return dataclasses.replace(first, others=tuple(others))


def read(config: HFConfig, architecture: Architecture) -> PixtralSpec:
    """Read the tower and what is between it and the decoder."""
    vision = config.inside("vision_config").with_defaults(_DEFAULTS)
    if vision.get("model_type", "pixtral") != "pixtral":
        raise UnsupportedModelError(
            f"config.json: model_type={shown(vision.get('model_type'))} in vision_config is not "
            "supported; start with language_model_only=True for prompts of text"
        )
    vision.must_be("num_channels", _CHANNELS)
    config.must_be("vision_feature_layer", -1)
    is_merged = architecture.name != _LLAVA
    if not is_merged:
        _check_llava(config)
    size, num_heads = vision.integer("hidden_size"), vision.integer("num_attention_heads")
    head_size = size // num_heads
    vision.must_be("head_dim", head_size)
    if head_size % 4 or size % num_heads:
        raise UnsupportedModelError(
            f"config.json: heads of hidden_size={size} and num_attention_heads={num_heads} in "
            "vision_config cannot be rotated by rows and columns"
        )
    theta = _rope_theta(vision)
    return PixtralSpec(
        patch_size=vision.integer("patch_size"),
        merge=config.integer("spatial_merge_size", 2) if is_merged else 1,
        image_token_id=config.token_id(
            "image_token_id" if config.get("image_token_id") is not None else "image_token_index",
            10,
            vocab_size=architecture.vocab_size,
        ),
        size=size,
        num_layers=vision.integer("num_hidden_layers"),
        attention=SelfAttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_size=head_size,
            scale=head_size**-0.5,
            rope=RopeConfig(size=head_size, theta=theta),
        ),
        mlp=MLPSpec(
            intermediate_size=vision.integer("intermediate_size"),
            activation=_activation(vision, "hidden_act"),
        ),
        rope=RopeConfig(size=head_size, theta=theta),
        projector_norm=_norm_of(architecture) if is_merged else None,
        projector_activation=_activation(config, "projector_hidden_act"),
        projector_bias=config.flag("multimodal_projector_bias", not is_merged),
    )


def _check_llava(config: HFConfig) -> None:
    """Refuse what the class of Pixtral 12B, which has other towers, too, does by default."""
    for name, value in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "full")):
        if config.get(name) != value:
            raise UnsupportedModelError(
                f"config.json: {name}={shown(config.get(name))} is not supported with images; "
                "start with language_model_only=True for prompts of text"
            )


# Of the class in transformers.
_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
    "hidden_act": "gelu",
}


def _rope_theta(vision: HFConfig) -> float:
    """The base of the frequencies, where older configs have it, and newer ones."""
    rope = vision.get("rope_parameters") or {}
    theta = vision.get("rope_theta", 10_000.0)
    if isinstance(rope, Mapping) and set(rope) <= {"rope_type", "rope_theta"}:
        theta = rope.get("rope_theta", theta)
        if rope.get("rope_type", "axial") in ("axial", "default"):
            if isinstance(theta, int | float) and not isinstance(theta, bool) and theta > 0:
                return float(theta)
    raise UnsupportedModelError(
        f"config.json: rope_parameters={shown(rope)} and rope_theta={shown(theta)} in "
        "vision_config are not supported"
    )


def _norm_of(architecture: Architecture) -> RMSNormSpec:
    """The projector's norm is as those of the decoder."""
    norm = architecture.final_norm
    assert isinstance(norm, RMSNormSpec), norm
    return RMSNormSpec(eps=norm.eps)


def _activation(config: HFConfig, field: str) -> str:
    function = config.get(field) or "gelu"
    if not isinstance(function, str) or function not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"config.json: {field}={shown(function)} is not supported; supported are "
            f"{', '.join(ACTIVATIONS)}"
        )
    return function


class Pixtral(nnx.Module):
    """The tower, and what makes its outputs fit the decoder. Modules have their names in
    checkpoints."""

    def __init__(self, spec: PixtralSpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike):
        self.vision_tower = _Encoder(spec, num_shards=num_shards, dtype=dtype)
        self.multi_modal_projector = _Projector(spec, hidden_size, dtype=dtype)

    def __call__(self, images: Images, ops: StateOps, mesh: Mesh | None) -> jax.Array:
        return self.multi_modal_projector(self.vision_tower(images, ops, mesh))


class _Encoder(nnx.Module):
    def __init__(self, spec: PixtralSpec, *, num_shards: int, dtype: DTypeLike):
        self.rope = spec.rope
        self.dtype = dtype
        numbers = _CHANNELS * spec.patch_size**2
        self.patch_conv = Linear(numbers, spec.size, bias=False, dtype=dtype)
        self.ln_pre = _NORM.make(spec.size, dtype=dtype)
        self.transformer = _Layers(spec, num_shards=num_shards, dtype=dtype)

    def __call__(self, images: Images, ops: StateOps, mesh: Mesh | None) -> jax.Array:
        hidden = self.ln_pre(self.patch_conv(images.pixels.astype(self.dtype)))
        context = tower_context(images.starts, rotations(self.rope, images.places), ops, mesh)
        for layer in self.transformer.layers:
            hidden = run_layer(layer, hidden, context)
        return hidden


class _Layers(nnx.Module):
    def __init__(self, spec: PixtralSpec, *, num_shards: int, dtype: DTypeLike):
        self.layers = nnx.List(
            _Layer(spec, num_shards=num_shards, dtype=dtype) for _ in range(spec.num_layers)
        )


class _Layer(nnx.Module):
    def __init__(self, spec: PixtralSpec, *, num_shards: int, dtype: DTypeLike):
        size, how = spec.size, {"num_shards": num_shards, "dtype": dtype}
        self.attention_norm = _NORM.make(size, dtype=dtype)
        self.attention = spec.attention.make(size, **how)
        self.ffn_norm = _NORM.make(size, dtype=dtype)
        self.feed_forward = spec.mlp.make(size, **how)

    def __call__(self, hidden: jax.Array, context: StepContext) -> jax.Array:
        hidden = hidden + self.attention(self.attention_norm(hidden), (), context)[0]
        return hidden + self.feed_forward(self.ffn_norm(hidden), context)


class _Projector(nnx.Module):
    def __init__(self, spec: PixtralSpec, hidden_size: int, *, dtype: DTypeLike):
        bias, self.activation = spec.projector_bias, spec.projector_activation
        norm = spec.projector_norm
        self.norm = None if norm is None else norm.make(spec.size, dtype=dtype)
        self.patch_merger = None if norm is None else _PatchMerger(spec, dtype=dtype)
        self.linear_1 = Linear(spec.size, hidden_size, bias=bias, dtype=dtype)
        self.linear_2 = Linear(hidden_size, hidden_size, bias=bias, dtype=dtype)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        if self.norm is not None and self.patch_merger is not None:
            hidden = self.patch_merger(self.norm(hidden))
        hidden = self.linear_1(hidden)
        passed = ACTIVATIONS[self.activation](hidden.astype(jnp.float32))
        return self.linear_2(passed.astype(hidden.dtype))


class _PatchMerger(nnx.Module):
    def __init__(self, spec: PixtralSpec, *, dtype: DTypeLike):
        self.num_merged = spec.merge**2
        self.merging_layer = Linear(spec.size * self.num_merged, spec.size, bias=False, dtype=dtype)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        # The weight's columns are, for each channel, the patches of a square.
        squares = hidden.reshape(-1, self.num_merged, hidden.shape[-1]).swapaxes(1, 2)
        return self.merging_layer(squares.reshape(len(squares), -1))


def rotations(rope: RopeConfig, places: jax.Array) -> Rotary:
    """The rotations of patches at rows and columns [P, 2]: every other frequency is of rows."""
    frequencies = inverse_frequencies(rope)
    turned = np.concatenate([frequencies[0::2], frequencies[1::2]])
    which = np.repeat([0, 1], [len(frequencies[0::2]), len(frequencies[1::2])])
    angles = places[:, which].astype(jnp.float32) * turned
    return Rotary(jnp.cos(angles), jnp.sin(angles))
