"""Reads the latent attention of a config.json, and says where a checkpoint has its weights."""

import math
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.layers.latent_attention import LatentAttentionSpec
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.layers.rope import RopeConfig
from jaxllm.models.checkpoint_map import (
    CheckpointMap,
    Concat,
    InHalves,
    Place,
    Rows,
    Rule,
    Source,
    Tensor,
    ViewedAs,
)
from jaxllm.models.hf_config import HFConfig, check_size
from jaxllm.models.rope_parameters import read_rope, rope_number
from jaxllm.models.spans import Beside, Span
from jaxllm.models.specs import Architecture

_MAX_SIZE = 1 << 20  # of all heads of a layer together

# Fields that follow from others. The classes of transformers compute them, whatever a file says.
FOLLOWING = dict.fromkeys(
    ("qk_head_dim", "head_dim"), "follows from qk_nope_head_dim and qk_rope_head_dim"
)


def read_latent_attention(
    config: HFConfig,
    *,
    rotates: bool = True,
    rope_is_part_of_head: bool = False,
    **rope_options: Any,
) -> LatentAttentionSpec:
    """Read latent attention from the usual field names.

    `rotates`: whether anything is rotated. `rope_is_part_of_head`: partial_rotary_factor is the
    rotated share of a whole head, not of its rotated part. `rope_options` are those of `read_rope`.
    """
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_kv_heads != num_heads:
        raise CheckpointError(
            f"config.json: num_key_value_heads={num_kv_heads} must be num_attention_heads="
            f"{num_heads}: latents make keys and values for each head"
        )
    latent, rope_size = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    nope, value = config.integer("qk_nope_head_dim"), config.integer("v_head_dim")
    head_size = nope + rope_size
    check_size("num_attention_heads times the size of a head", num_heads * head_size, _MAX_SIZE)
    check_size("num_attention_heads times v_head_dim", num_heads * value, _MAX_SIZE)
    rope = None
    if rotates:
        rope = _read_rope(config, rope_size, head_size, rope_is_part_of_head, **rope_options)
    return LatentAttentionSpec(
        num_heads=num_heads,
        latent_size=latent,
        nope_size=nope,
        rope_size=rope_size,
        v_head_size=value,
        q_latent_size=(
            None if config.get("q_lora_rank") is None else config.integer("q_lora_rank")
        ),
        scale=head_size**-0.5 * (1.0 if rope is None else _magnitude(config, rope)) ** 2,
        rope=rope,
        rope_interleave=rotates and config.flag("rope_interleave", True),
        # The norms of latents have the epsilon of their class, whatever rms_norm_eps is.
        norm=RMSNormSpec(eps=1e-6),
        bias=config.flag("attention_bias"),
    )


def _read_rope(
    config: HFConfig,
    rope_size: int,
    head_size: int,
    is_part_of_head: bool,
    **options: Any,
) -> RopeConfig:
    """Read the rotation of so many elements of a head."""
    if is_part_of_head:
        share = rope_size / head_size
        rope = read_rope(
            config, head_size=head_size, may_be_partial=True, default_share=share, **options
        )
    else:
        rope = read_rope(config, head_size=rope_size, **options)
    if rope.size != rope_size:
        raise CheckpointError(
            f"config.json: partial_rotary_factor rotates {rope.size} elements of a head, which "
            f"contradicts qk_rope_head_dim={rope_size}"
        )
    return rope


def _magnitude(config: HFConfig, rope: RopeConfig) -> float:
    """By how much queries and keys grow with the stretch of the context, if the config says so."""
    factor = getattr(rope.scaling, "factor", 1.0)
    of_all = rope_number(config, "mscale_all_dim")
    if of_all is None or factor <= 1:
        return 1.0
    return 0.1 * of_all * math.log(factor) + 1.0


def with_latents(names: CheckpointMap, architecture: Architecture) -> CheckpointMap:
    """The map for checkpoints with latent attention, the same in all layers that have it."""
    mixers = (mixer for layer in architecture.layers for mixer in layer.mixers)
    spec = next((mixer for mixer in mixers if isinstance(mixer, LatentAttentionSpec)), None)
    if spec is None:
        return names
    return names.with_rules(
        q_proj=_rotated(spec, "q_proj", spec.nope_size),
        q_b_proj=_rotated(spec, "q_b_proj", spec.nope_size),
        kv_a_proj_with_mqa=_rotated(spec, "kv_a_proj_with_mqa", spec.latent_size),
        fused_qkv_a_proj=_to_latents(spec),
        kv_b_proj=_of_heads(spec),
    )


def _rotated(spec: LatentAttentionSpec, module: str, first: int) -> Rule:
    """A rule for a tensor whose heads are rotated from row `first` on."""

    def rule(place: Place) -> Source:
        (shape,) = place.pieces
        tensor = place.tensor(module, shape)
        if not spec.rope_interleave:
            return tensor
        return InHalves(tensor, first + spec.rope_size, spec.rope_size, first)

    return rule


def _to_latents(spec: LatentAttentionSpec) -> Rule:
    """A rule that concatenates the projections to the latents of queries and of the cache."""

    def rule(place: Place) -> Source:
        of_queries, of_cache = place.pieces
        row = _rotated(spec, "kv_a_proj_with_mqa", spec.latent_size)
        return Concat(
            (place.tensor("q_a_proj", of_queries), row(place._replace(pieces=(of_cache,))))
        )

    return rule


def _of_heads(spec: LatentAttentionSpec) -> Rule:
    """A rule for a tensor with the rows of each head's keys and then those of its values."""

    def rule(place: Place) -> Source:
        ((heads, size, latent),) = place.pieces
        of_head = spec.nope_size + spec.v_head_size
        module = f"{place.parent}.{place.module}"
        is_key = place.leaf.startswith("k_")
        leaf = place.leaf.removeprefix("k_").removeprefix("v_")
        whole = place.tensor_of(module, leaf, (heads * of_head, latent))
        starts = range(0 if is_key else spec.nope_size, heads * of_head, of_head)
        rows = tuple(
            Rows(whole, start, start + size)
            if isinstance(whole, Tensor)
            else Span(whole, start, start + size)
            for start in starts
        )
        of_heads = ViewedAs(Concat(rows), (heads, size, latent))
        # The keys name the tensors of both.
        return Beside(of_heads, whole) if is_key and not isinstance(whole, Tensor) else of_heads

    return rule
