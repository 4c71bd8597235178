"""Decides what an engine that takes prompts of embeddings has beside the others."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxllm_kernels.common import round_up

from jaxllm.config import EngineConfig
from jaxllm.errors import UnsupportedModelError, ValidationError, refused
from jaxllm.models.specs import Architecture
from jaxllm.plan.images import ImagePlan
from jaxllm.pooler_config import Pooling
from jaxllm.prompt_embeds.item import EmbedsSpec

# The most embeddings that one program writes.
_ROWS_PER_WRITE = 256


@dataclass(frozen=True, kw_only=True)
class EmbedsPlan:
    """The rows for embeddings in the pool of those that are given, behind the rows for images."""

    spec: EmbedsSpec
    num_rows: int  # what a step can compute
    rows_per_write: int


def plan_embeds(
    config: EngineConfig,
    architecture: Architecture,
    images: ImagePlan | None,
    pooling: Pooling | None,
    dtype: Any,
    max_num_batched_tokens: int,
) -> EmbedsPlan | None:
    """Plan the rows; None: prompts have tokens."""
    if not config.media.enable_prompt_embeds:
        return None
    _check(config, architecture, pooling)
    rows_per_write = min(_ROWS_PER_WRITE, max_num_batched_tokens)
    return EmbedsPlan(
        spec=EmbedsSpec(
            hidden_size=architecture.hidden_size,
            dtype=jnp.dtype(dtype).name,
            first_row=0 if images is None else images.num_rows,
        ),
        num_rows=round_up(max_num_batched_tokens, rows_per_write),
        rows_per_write=rows_per_write,
    )


def given_rows(images: ImagePlan | None, embeds: EmbedsPlan | None) -> int:
    """The rows of the pool of embeddings that are given; 0: there is no pool."""
    return sum(one.num_rows for one in (images, embeds) if one is not None)


def _check(config: EngineConfig, architecture: Architecture, pooling: Pooling | None) -> None:
    """Refuse what does not go with embeddings."""
    parallel = config.parallel
    if pooling is not None:
        raise refused("enable_prompt_embeds", True, "an engine that pools reads tokens alone")
    if architecture.per_layer_input is not None:
        raise UnsupportedModelError(
            "enable_prompt_embeds: each layer of the model has an input of its own for each token, "
            "which embeddings do not have"
        )
    for name, value, neutral in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, 1),
        ("nnodes", parallel.nnodes, 1),
    ):
        if value != neutral:
            raise refused(name, value, "it is not supported with enable_prompt_embeds")
    if config.speculation.read() is not None:
        raise ValidationError(
            "speculative_config: it is not supported with enable_prompt_embeds",
            parameter="speculative_config",
        )
