"""Chooses limits and dtypes that the user leaves open, and refuses impossible ones."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError
from jaxllm.logging import init_logger
from jaxllm.models.specs import Architecture

logger = init_logger(__name__)


class Defaults(NamedTuple):
    """The defaults of a platform."""

    max_num_seqs: int
    max_num_batched_tokens: int


DEFAULTS = {
    # On CPUs larger batches do not multiply faster, and activations between two products no longer
    # fit in a cache.
    "cpu": Defaults(max_num_seqs=64, max_num_batched_tokens=512),
    "gpu": Defaults(max_num_seqs=256, max_num_batched_tokens=8192),
    "tpu": Defaults(max_num_seqs=256, max_num_batched_tokens=2048),
}


def choose_dtype(asked: str, architecture: Architecture, platform: str) -> Any:
    """The dtype of weights and activations."""
    name = architecture.dtype if asked == "auto" else asked
    if name == "float16" and platform != "gpu":
        if asked == "float16":
            raise ValidationError(
                f"dtype='float16' is not supported on {platform}; use dtype='bfloat16'",
                parameter="dtype",
                value=asked,
            )
        logger.info("dtype: the checkpoint has float16; %s runs it in bfloat16", platform)
        name = "bfloat16"
    return jnp.dtype(name)


def choose_max_model_len(asked: int | None, architecture: Architecture) -> int:
    """The longest sequence: the model's limit, or less."""
    longest = architecture.max_model_len
    if asked is None:
        return longest
    if asked > longest:
        raise ValidationError(
            f"max_model_len={asked} is above the {longest} positions of the model's config; lower "
            "it, or extend the model with hf_overrides (rope_parameters, max_position_embeddings)",
            parameter="max_model_len",
            value=asked,
        )
    return asked


def choose_max_num_batched_tokens(
    config: EngineConfig, platform: str, max_num_seqs: int, max_model_len: int
) -> int:
    """The budget of a step, which has room for one token of every request."""
    chunked = config.scheduler.enable_chunked_prefill
    asked = config.scheduler.max_num_batched_tokens
    if asked is None:
        tokens = max(DEFAULTS[platform].max_num_batched_tokens, max_num_seqs)
        return tokens if chunked else max(tokens, max_model_len)
    if asked < max_num_seqs:
        raise ValidationError(
            f"max_num_batched_tokens={asked} is below max_num_seqs={max_num_seqs}; a step must "
            "have room for one token of every request",
            parameter="max_num_batched_tokens",
            value=asked,
        )
    if not chunked and asked < max_model_len:
        raise ValidationError(
            f"max_num_batched_tokens={asked} is below max_model_len={max_model_len}, and with "
            "enable_chunked_prefill=False a prompt must fit in one step; raise it or chunk",
            parameter="max_num_batched_tokens",
            value=asked,
        )
    return asked
