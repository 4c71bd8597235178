"""Chooses how whole prompts are computed in models with latent attention, once per engine."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxllm_kernels.common import cdiv
from jaxllm_kernels.native.library import Library, NoLibrary
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_self_attention.api import SelfAttentionOp
from jaxllm_kernels.ragged_self_attention.gpu import MosaicSelfAttention
from jaxllm_kernels.ragged_self_attention.native import NativeSelfAttention
from jaxllm_kernels.ragged_self_attention.tpu import TpuSelfAttention
from jaxllm_kernels.ragged_self_attention.xla import XlaSelfAttention

from jaxllm.layers.expanded_latents import ExpandedForm
from jaxllm.layers.latent_attention import LatentAttentionSpec
from jaxllm.logging import init_logger
from jaxllm.models.specs import Architecture

logger = init_logger(__name__)


def with_expanded_latents(
    architecture: Architecture,
    chip: Chip,
    library: Library | NoLibrary,
    num_shards: int,
    num_tokens: int,
    dtype: Any,
) -> Architecture:
    """The architecture whose latent attention makes keys and values for whole prompts, if steps of
    up to so many tokens have such prompts and the chip a kernel for them. Otherwise all rows are
    computed alike, and the log says why."""

    def form_of(spec: LatentAttentionSpec) -> ExpandedForm | None:
        fewest = fewest_tokens(spec)
        if fewest is None or fewest > num_tokens:
            return None
        op = _choose_op(spec, chip, library, num_shards, num_tokens, dtype)
        return ExpandedForm(op=op, fewest_tokens=fewest)

    try:
        return with_forms(architecture, form_of)
    except ValueError as error:
        logger.warning(
            "latent attention: whole prompts are computed like other rows, since %s", error
        )
        return architecture


def with_forms(
    architecture: Architecture, form_of: Callable[[LatentAttentionSpec], ExpandedForm | None]
) -> Architecture:
    """The architecture with these forms of its latent attentions."""

    @functools.cache
    def expand(mixer: Any) -> Any:
        is_latent = isinstance(mixer, LatentAttentionSpec)
        return replace(mixer, expanded=form_of(mixer)) if is_latent else mixer

    layers = tuple(
        replace(layer, mixers=tuple(map(expand, layer.mixers))) for layer in architecture.layers
    )
    return replace(architecture, layers=layers)


def fewest_tokens(spec: LatentAttentionSpec) -> int | None:
    """From how many tokens on a prompt has less work with keys and values; None: never.

    A pair of tokens takes 2 * latent_size + rope_size products of a head with latents, and as many
    as keys and values have numbers without. The latter are made of the latents of all tokens of the
    step. A token of a whole prompt sees half of it on average. So a prompt that is alone in a step
    has less work at any length, since nothing is absorbed in its step. This is the length from
    which on one also has less work beside as many tokens of rows whose matrices are absorbed.
    """
    made = spec.nope_size + spec.v_head_size
    saved = 2 * spec.latent_size - made
    if saved <= 0:
        return None
    return max(cdiv(2 * spec.latent_size * made, saved), 2)


def _choose_op(
    spec: LatentAttentionSpec,
    chip: Chip,
    library: Library | NoLibrary,
    num_shards: int,
    num_tokens: int,
    dtype: Any,
) -> SelfAttentionOp:
    """The kernel for a device's heads; raises ValueError if there is none."""
    head_size, value_size = spec.nope_size + spec.rope_size, spec.v_head_size
    if chip.platform == "cpu":
        if isinstance(library, NoLibrary):  # the reason is logged already
            return XlaSelfAttention().tuned_for(chip)
        return NativeSelfAttention.load(library)
    if chip.platform == "gpu":
        attention = MosaicSelfAttention.tuned_for(chip)
        attention.check(head_size=head_size, value_size=value_size, dtype=dtype)
        return attention
    heads = spec.num_heads // num_shards
    kernel = TpuSelfAttention(chip=chip.name)
    kernel.check(
        num_tokens=num_tokens,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=head_size,
        value_size=value_size,
        dtype=dtype,
    )
    return kernel
