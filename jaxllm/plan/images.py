"""Decides whether an engine sees images, and what its tower needs."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from jaxllm_kernels.ragged_paged_attention.api import BatchLimits

from jaxllm.config import EngineConfig
from jaxllm.errors import CheckpointError, ValidationError, refused
from jaxllm.layers.self_attention import SelfAttentionSpec
from jaxllm.layers.state import StateOps
from jaxllm.logging import init_logger
from jaxllm.media.device import encoder_sizes
from jaxllm.media.item import ImageSpec
from jaxllm.media.preprocessor import read_image_spec
from jaxllm.media.processors.files import VideoWanted, Wanted
from jaxllm.media.resizing import Tiles
from jaxllm.models.specs import Architecture

logger = init_logger(__name__)

# The heads of layers, and the most tokens of a step -> what computes them.
OpsOfTower = Callable[[list[SelfAttentionSpec], int], StateOps]


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """What an engine that sees images has beside the others."""

    spec: ImageSpec
    num_rows: int  # of the pool: how many tokens of images it holds
    # Of each program of the tower how many patches it computes, the smallest first, and by what.
    ops: dict[int, StateOps]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many patches the programs of the tower compute."""
        return tuple(self.ops)


def wants_images(config: EngineConfig) -> bool:
    """Whether the user wants the tower of a model that has one."""
    media = config.media
    return not media.language_model_only and max(media.max_images, media.max_videos) > 0


def with_images(
    config: EngineConfig, architecture: Architecture, model_dir: Path, *, pools: bool
) -> tuple[Architecture, ImageSpec | None]:
    """Keep the tower of a model if its files say how images are made, and return how; None: prompts
    are text."""
    tower = architecture.tower
    if tower is None:
        why = "it pools" if pools else "the model has no tower for images that is supported"
        _refuse_without_tower(config, why)
        return architecture, None
    spec = read_image_spec(
        model_dir,
        Wanted(
            tower.processor,
            tower.patch_size,
            tower.merge,
            tower.image_token_id,
            tower.image_size,
            tower.marks,
            sees_all=tower.seeing != "before",
            only_in_windows=tower.seeing == "image_in_windows",
            video=None if tower.video is None else VideoWanted(*tower.video),
        ),
        changes=config.media.mm_processor_kwargs or {},
        max_images=config.media.max_images,
        max_videos=config.media.max_videos,
        wants_videos=config.media.wants("video"),
    )
    if spec is None:
        why = "the model's directory has no preprocessor_config.json or no tokenizer.json"
        _refuse_without_tower(config, why)
        logger.warning("prompts are text alone, though the model has a tower for images: %s", why)
        return dataclasses.replace(architecture, tower=None), None
    _check_tokens(spec, architecture.vocab_size)
    _check(config, spec)
    num_shards = config.parallel.tensor_parallel_size
    if not architecture.cuts_tower(num_shards):
        logger.warning(
            "the tower for images is computed whole on each of %d devices, since its heads or its "
            "MLP cannot be cut into so many equal parts",
            num_shards,
        )
    return architecture, spec


def plan_images(
    spec: ImageSpec | None,
    architecture: Architecture,
    of_tower: OpsOfTower,
    limits: BatchLimits,
    max_model_len: int,
) -> ImagePlan | None:
    """The pool holds what a step can see, and at least two images of the largest size, so that one
    follows the other without delay. An image with more tokens than a prompt is refused earlier.
    `of_tower` is `encoder_ops` of the plan's devices."""
    if spec is None:
        return None
    assert architecture.tower is not None
    _check_budget(spec, limits.num_tokens, limits.num_rows)
    largest = min(spec.max_patches // spec.patches_per_token, max_model_len)
    sizes = encoder_sizes(spec, largest * spec.patches_per_token)
    return ImagePlan(
        spec=spec,
        num_rows=max(limits.num_tokens, 2 * largest),
        ops=_ops_by_size(spec, architecture.tower.attention, of_tower, sizes),
    )


def _ops_by_size(
    spec: ImageSpec, attention: SelfAttentionSpec, of_tower: OpsOfTower, sizes: Iterable[int]
) -> dict[int, StateOps]:
    """Each program has its own, since a kernel may have no room for large ones. Larger programs
    than one that has XLA's loops have these, too, so that the reason is logged once."""
    ops: dict[int, StateOps] = {}
    chosen = None
    for size in sizes:
        if chosen is None or chosen.self_attention.name != "xla":
            # A tile has a token for its class beside its patches.
            has_tiles = isinstance(spec.resizing, Tiles)
            num_class_tokens = size // spec.patches_per_unit if has_tiles else 0
            chosen = of_tower([attention], size + num_class_tokens)
        ops[size] = chosen
    return ops


def _refuse_without_tower(config: EngineConfig, why: str) -> None:
    """Refuse wishes for images and videos that an engine without a tower would not meet."""
    media = config.media
    if not wants_images(config):
        return
    remedy = f"prompts of this engine are text alone: {why}; leave it out"
    if media.wants("image") or media.wants("video"):
        raise refused("limit_mm_per_prompt", dict(media.limit_mm_per_prompt or {}), remedy)
    if media.mm_processor_kwargs:
        raise refused("mm_processor_kwargs", dict(media.mm_processor_kwargs), remedy)


def _check_budget(spec: ImageSpec, max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Refuse steps that could never hold an image that must not be cut, beside a decode of each
    other row."""
    least = spec.max_patches // spec.patches_per_token + max_num_seqs
    if spec.sees_all and max_num_batched_tokens < least:
        raise refused(
            "max_num_batched_tokens",
            max_num_batched_tokens,
            f"a step must hold a whole image, whose tokens see each other, beside a token of each "
            f"of max_num_seqs={max_num_seqs} requests: give at least {least}",
        )


def _check_tokens(spec: ImageSpec, vocab_size: int) -> None:
    """Refuse tokens that are put into prompts and that the model does not have. Reading the tower
    has checked those of config.json."""
    for name, token in (
        ("image_break_token", spec.break_token_id),
        ("image_end_token", spec.end_token_id),
    ):
        if token is not None and token >= vocab_size:
            raise CheckpointError(
                f"tokenizer.json: {name} is the token {token}, which must be below "
                f"vocab_size={vocab_size}"
            )


def _check(config: EngineConfig, spec: ImageSpec) -> None:
    """Refuse what does not go with images yet."""
    if spec.video is None and config.media.wants("video"):
        raise refused(
            "limit_mm_per_prompt",
            dict(config.media.limit_mm_per_prompt or {}),
            "this model takes no video; leave it out",
        )
    parallel = config.parallel
    threshold = config.scheduler.long_prefill_token_threshold
    if spec.sees_all and threshold:
        raise refused(
            "long_prefill_token_threshold", threshold, "it might cut an image, whose tokens see "
            "each other; leave it out",
        )  # fmt: skip
    remedy = "start with language_model_only=True for prompts of text"
    for name, value, neutral in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, 1),
        ("nnodes", parallel.nnodes, 1),
    ):
        if value != neutral:
            raise refused(name, value, f"it is not supported with images; {remedy}")
    speculation = config.speculation.read()
    if speculation is not None and not speculation.proposes:
        raise ValidationError(
            f"speculative_config: drafts of a model or a head are not supported with images, since "
            f"these see none; use the method 'ngram', or {remedy}",
            parameter="speculative_config",
        )
