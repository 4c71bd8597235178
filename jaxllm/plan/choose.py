"""Chooses limits and dtypes that the user leaves open, and refuses impossible ones."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError, refused
from jaxllm.logging import init_logger
from jaxllm.models.specs import Architecture
from jaxllm.speculative_config import Speculation

logger = init_logger(__name__)


class Defaults(NamedTuple):
    """The defaults of a platform."""

    max_num_seqs: int
    max_num_batched_tokens: int
    # Up to so many tokens a step takes hardly longer than with one.
    num_free_tokens: int


DEFAULTS = {
    # On CPUs larger batches do not multiply faster, and activations between two products no longer
    # fit in a cache.
    "cpu": Defaults(max_num_seqs=64, max_num_batched_tokens=512, num_free_tokens=24),
    "gpu": Defaults(max_num_seqs=256, max_num_batched_tokens=8192, num_free_tokens=256),
    "tpu": Defaults(max_num_seqs=256, max_num_batched_tokens=2048, num_free_tokens=192),
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


def choose_speculation(
    config: EngineConfig, platform: str, max_num_seqs: int, max_num_batched_tokens: int
) -> Speculation | None:
    """How the engine drafts, and how many drafts rows get if so many requests run. By default they
    get as many as leave a step within the tokens that are nearly free."""
    speculation = config.speculation.read()
    if speculation is None:
        return None
    width = 1 + speculation.num_drafts
    # Two steps may be in flight, and what a request holds behind a window has room for one.
    if max_num_batched_tokens < 2 * width:
        raise refused(
            "max_num_batched_tokens",
            max_num_batched_tokens,
            f"with num_speculative_tokens={speculation.num_drafts}, give at least {2 * width}",
        )
    by_requests = speculation.drafts_by_requests[:max_num_seqs]
    if not by_requests:
        num_free = DEFAULTS[platform].num_free_tokens
        most = max(num_free // width, 1)
        by_requests = (speculation.num_drafts,) * min(most, max_num_seqs)
    return dataclasses.replace(
        speculation,
        drafts_by_requests=by_requests,
        is_on_one_host=config.parallel.nnodes == 1,
    )


def choose_max_num_batched_tokens(
    config: EngineConfig,
    platform: str,
    max_num_seqs: int,
    max_model_len: int,
    *,
    is_encoder: bool = False,
) -> int:
    """The budget of a step, which has room for one token of every request. An encoder takes whole
    prompts."""
    chunked = config.scheduler.enable_chunked_prefill and not is_encoder
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
        why = "with enable_chunked_prefill=False a prompt must fit in one step; raise it or chunk"
        if is_encoder:
            why = "an encoder computes a prompt in one step; raise it, or lower max_model_len"
        raise ValidationError(
            f"max_num_batched_tokens={asked} is below max_model_len={max_model_len}, and {why}",
            parameter="max_num_batched_tokens",
            value=asked,
        )
    return asked
