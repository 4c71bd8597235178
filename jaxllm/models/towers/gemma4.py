"""The tower of Gemma 4.

An image keeps its ratio and has as many patches as fit into a number of tokens. Patches see all
patches of their image and have learned places, by their column and by their row, which also rotate
one half of each head each. Scores are not scaled, since queries, keys and values are normalised.
The mean of a square of patches becomes a token. Small models bound what goes into and comes out of
each product, with numbers from the checkpoint.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.layers.activation import ACTIVATIONS
from jaxllm.layers.context import StepContext
from jaxllm.layers.linear import Linear
from jaxllm.layers.mlp import MLPSpec
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.layers.rope import RopeConfig, Rotary, inverse_frequencies
from jaxllm.layers.self_attention import SelfAttentionSpec, attend
from jaxllm.layers.state import StateOps
from jaxllm.models.checkpoint_map import CheckpointMap
from jaxllm.models.family import read_mlp
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture
from jaxllm.models.tower import Images, Seeing
from jaxllm.models.towers.layers import run_layer, tower_context
from jaxllm.parallel.sharding import Axes

_CHANNELS = 3
_MOST_TOKENS = 1120  # that processors make of an image


@dataclass(frozen=True, kw_only=True)
class Gemma4TowerSpec:
    """The static part of the tower; implements `jaxllm.models.tower.TowerSpec`."""

    processor: ClassVar[str] = "Gemma4ImageProcessor"

    patch_size: int
    merge: int
    image_token_id: int
    marks: tuple[int, int]
    video: None = None
    seeing: Seeing
    size: int
    num_layers: int
    num_places: int  # in a row or a column
    attention: SelfAttentionSpec
    theta: float
    mlp: MLPSpec
    norm: RMSNormSpec
    is_bounded: bool
    is_standardised: bool
    image_size: None = None
    num_outputs: int = 1

    def check(self, num_shards: int) -> None:
        self.attention.check(num_shards)
        self.mlp.check(num_shards)

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> "Gemma4Tower":
        return Gemma4Tower(self, hidden_size, dtype=dtype)

    def names(self, names: CheckpointMap) -> CheckpointMap:
        return names


def read(config: HFConfig, architecture: Architecture) -> Gemma4TowerSpec:
    """Read the tower and what is between it and the decoder."""
    vision = config.inside("vision_config").with_defaults(_DEFAULTS)
    vision.must_be("model_type", "gemma4_vision")
    vision.must_be("attention_bias", False)
    size, num_heads = vision.integer("hidden_size"), vision.integer("num_attention_heads")
    head_size, num_places = vision.integer("head_dim"), vision.integer("position_embedding_size")
    merge = vision.integer("pooling_kernel_size")
    vision.must_be("global_head_dim", head_size)  # no layer differs from the others
    if head_size % 4 or num_places < _MOST_TOKENS * merge:
        raise UnsupportedModelError(
            f"config.json: head_dim={head_size} and position_embedding_size={num_places} in "
            f"vision_config are not supported: they must be a multiple of 4, and at least "
            f"{_MOST_TOKENS} * pooling_kernel_size"
        )
    rope = vision.inside("rope_parameters") if vision.get("rope_parameters") else vision
    rope.must_be("rope_type", "axial", "default")  # two words for one rotation
    norm = RMSNormSpec(eps=vision.positive("rms_norm_eps", 1e-6), rounds_first=False)
    text = config.inside("text_config")
    _check_given(architecture)
    token_id = functools.partial(config.token_id, vocab_size=architecture.vocab_size)
    return Gemma4TowerSpec(
        patch_size=vision.integer("patch_size"),
        merge=merge,
        image_token_id=token_id("image_token_id", 258_880),
        marks=(token_id("boi_token_id", 255_999), token_id("eoi_token_id", 258_882)),
        # Its reader has refused other words.
        seeing="image_in_windows" if text.get("use_bidirectional_attention") else "before",
        size=size,
        num_layers=vision.integer("num_hidden_layers"),
        num_places=num_places,
        attention=SelfAttentionSpec(
            num_heads=num_heads,
            num_kv_heads=vision.integer("num_key_value_heads"),
            head_size=head_size,
            scale=1.0,
            qk_norm=norm,
        ),
        theta=rope.positive("rope_theta", 100.0),
        mlp=read_mlp(vision, activation="hidden_activation"),
        norm=norm,
        is_bounded=vision.flag("use_clipped_linears"),
        is_standardised=vision.flag("standardize"),
    )


def _check_given(architecture: Architecture) -> None:
    """Refuse an id of padding that is no token: layers' own inputs of images are those of it."""
    spec = architecture.per_layer_input
    if spec is not None and not 0 <= spec.of_given < architecture.vocab_size:
        raise CheckpointError(
            f"config.json: pad_token_id={spec.of_given} must be below "
            f"vocab_size={architecture.vocab_size}, since images have its inputs of layers"
        )


# Of the class in transformers.
_DEFAULTS = {
    "model_type": "gemma4_vision",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10_240,
    "rope_type": "axial",
}


class Gemma4Tower(nnx.Module):
    """The tower, and what makes its outputs fit the decoder. Modules have their names in
    checkpoints."""

    def __init__(self, spec: Gemma4TowerSpec, hidden_size: int, *, dtype: DTypeLike):
        self.vision_tower = _Encoder(spec, dtype=dtype)
        self.embed_vision = _Projector(spec, hidden_size, dtype=dtype)

    def __call__(self, images: Images, ops: StateOps, mesh: Mesh | None) -> jax.Array:
        return self.embed_vision(self.vision_tower(images, ops, mesh))


class _Encoder(nnx.Module):
    def __init__(self, spec: Gemma4TowerSpec, *, dtype: DTypeLike):
        self.spec = spec
        self.patch_embedder = _PatchEmbedder(spec, dtype=dtype)
        self.encoder = _Layers(spec, dtype=dtype)
        if spec.is_standardised:
            self.std_bias, self.std_scale = (
                nnx.Param(jnp.zeros(spec.size, dtype), axes=("hidden",)) for _ in range(2)
            )

    def __call__(self, images: Images, ops: StateOps, mesh: Mesh | None) -> jax.Array:
        spec = self.spec
        hidden = self.patch_embedder(images)
        dtype = hidden.dtype
        rotary = rotated_in_halves(spec.attention.head_size, spec.theta, images.places)
        context = tower_context(images.starts, rotary, ops, mesh)
        for layer in self.encoder.layers:
            hidden = run_layer(layer, hidden, context)
        squares = hidden.reshape(-1, spec.merge**2, spec.size).astype(jnp.float32)
        hidden = squares.mean(axis=1).astype(dtype).astype(jnp.float32) * spec.size**0.5
        if spec.is_standardised:
            hidden = hidden - self.std_bias[...].astype(jnp.float32)
            hidden = hidden * self.std_scale[...].astype(jnp.float32)
        return hidden.astype(dtype)


class _PatchEmbedder(nnx.Module):
    def __init__(self, spec: Gemma4TowerSpec, *, dtype: DTypeLike):
        self.patch_size, self.dtype = spec.patch_size, dtype
        numbers = _CHANNELS * spec.patch_size**2
        self.input_proj = Linear(numbers, spec.size, bias=False, dtype=dtype)
        self.position_embedding_table = nnx.Param(
            jnp.zeros((2, spec.num_places, spec.size), dtype), axes=(None, None, "hidden")
        )

    def __call__(self, images: Images) -> jax.Array:
        # The weight's columns are, for each pixel, its channels.
        pixels = images.pixels.reshape(-1, _CHANNELS, self.patch_size**2).swapaxes(1, 2)
        pixels = 2 * (pixels.reshape(len(pixels), -1) - 0.5)
        of_columns, of_rows = self.position_embedding_table[...]
        places = of_columns[images.places[:, 1]] + of_rows[images.places[:, 0]]
        return self.input_proj(pixels.astype(self.dtype)) + places


class _Layers(nnx.Module):
    def __init__(self, spec: Gemma4TowerSpec, *, dtype: DTypeLike):
        self.layers = nnx.List(_Layer(spec, dtype=dtype) for _ in range(spec.num_layers))


class _Layer(nnx.Module):
    def __init__(self, spec: Gemma4TowerSpec, *, dtype: DTypeLike):
        (
            self.input_layernorm,
            self.post_attention_layernorm,
            self.pre_feedforward_layernorm,
            self.post_feedforward_layernorm,
        ) = (spec.norm.make(spec.size, dtype=dtype) for _ in range(4))
        self.self_attn = _Attention(spec, dtype=dtype)
        self.mlp = _MLP(spec, dtype=dtype)

    def __call__(self, hidden: jax.Array, context: StepContext) -> jax.Array:
        attended = self.self_attn(self.input_layernorm(hidden), context)
        hidden = hidden + self.post_attention_layernorm(attended)
        passed = self.mlp(self.pre_feedforward_layernorm(hidden))
        return hidden + self.post_feedforward_layernorm(passed)


class _Attention(nnx.Module):
    """Each product has bounds of its own, so that those of queries, keys and values are three."""

    def __init__(self, spec: Gemma4TowerSpec, *, dtype: DTypeLike):
        self.spec = its = spec.attention
        rows = its.num_heads * its.head_size
        kv_rows = its.num_kv_heads * its.head_size
        self.q_proj, self.k_proj, self.v_proj = (
            _Bounded(spec, spec.size, out, axes=("heads", "hidden"), dtype=dtype)
            for out in (rows, kv_rows, kv_rows)
        )
        self.o_proj = _Bounded(spec, rows, spec.size, axes=("hidden", "heads"), dtype=dtype)
        self.q_norm, self.k_norm = (spec.norm.make(its.head_size, dtype=dtype) for _ in range(2))
        without_weight = dataclasses.replace(spec.norm, has_weight=False)
        self.v_norm = without_weight.make(its.head_size, dtype=dtype)

    def __call__(self, x: jax.Array, context: StepContext) -> jax.Array:
        assert context.rotary is not None
        with jax.named_scope("attention"):
            shape = len(x), -1, self.spec.head_size
            q, k, v = (
                norm(project(x).reshape(shape))
                for project, norm in (
                    (self.q_proj, self.q_norm),
                    (self.k_proj, self.k_norm),
                    (self.v_proj, self.v_norm),
                )
            )
            q, k = (rotate_halves(heads, context.rotary) for heads in (q, k))
            return self.o_proj(attend(self.spec, q, k, v, context).reshape(len(x), -1))


class _MLP(nnx.Module):
    def __init__(self, spec: Gemma4TowerSpec, *, dtype: DTypeLike):
        size, self.activation = spec.mlp.intermediate_size, spec.mlp.activation
        self.gate_proj, self.up_proj = (
            _Bounded(spec, spec.size, size, axes=("mlp", "hidden"), dtype=dtype) for _ in range(2)
        )
        self.down_proj = _Bounded(spec, size, spec.size, axes=("hidden", "mlp"), dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("mlp"):
            gate = ACTIVATIONS[self.activation](self.gate_proj(x).astype(jnp.float32))
            return self.down_proj((gate * self.up_proj(x)).astype(x.dtype))


class _Bounded(nnx.Module):
    """A product whose inputs and outputs have bounds, in models that have them."""

    def __init__(
        self, spec: Gemma4TowerSpec, inputs: int, outputs: int, *, axes: Axes, dtype: DTypeLike
    ):
        self.linear = Linear(inputs, outputs, bias=False, axes=axes, dtype=dtype)
        self.is_bounded = spec.is_bounded
        if spec.is_bounded:
            self.input_min, self.input_max, self.output_min, self.output_max = (
                nnx.Param(jnp.zeros(1, dtype), axes=(None,)) for _ in range(4)
            )

    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.is_bounded:
            return self.linear(x)
        y = self.linear(jnp.clip(x, self.input_min[...], self.input_max[...]))
        return jnp.clip(y, self.output_min[...], self.output_max[...])


class _Projector(nnx.Module):
    def __init__(self, spec: Gemma4TowerSpec, hidden_size: int, *, dtype: DTypeLike):
        without_weight = dataclasses.replace(spec.norm, has_weight=False)
        self.embedding_pre_projection_norm = without_weight.make(spec.size, dtype=dtype)
        self.embedding_projection = Linear(spec.size, hidden_size, bias=False, dtype=dtype)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return self.embedding_projection(self.embedding_pre_projection_norm(hidden))


def rotated_in_halves(head_size: int, theta: float, places: jax.Array) -> Rotary:
    """The rotations of patches at rows and columns [P, 2]: [P, 2, head_size / 4], by the column and
    by the row, for `rotate_halves`."""
    frequencies = inverse_frequencies(RopeConfig(size=head_size // 2, theta=theta))
    angles = places[:, ::-1, None].astype(jnp.float32) * frequencies
    return Rotary(jnp.cos(angles), jnp.sin(angles))


def rotate_halves(heads: jax.Array, rotary: Rotary) -> jax.Array:
    """Rotate each half of heads [P, N, H] as if it were a head."""
    cos, sin = (its[:, None] for its in rotary)
    pairs = heads.astype(jnp.float32).reshape(*heads.shape[:2], 2, 2, -1)
    first, second = pairs[..., 0, :], pairs[..., 1, :]
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-2)
    return turned.reshape(heads.shape).astype(heads.dtype)
