"""Reads what a model's directory says of images, in the files of transformers' processors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.files import read_json
from jaxllm.logging import init_logger
from jaxllm.media.item import ImageSpec
from jaxllm.media.processors.files import (
    FILE,
    VIDEO_FILE,
    Files,
    UnsupportedVideosError,
    Wanted,
)
from jaxllm.media.processors.registry import PROCESSORS

logger = init_logger(__name__)

_MAX_TOKENIZER_BYTES = 1 << 28


def read_image_spec(
    model_dir: Path,
    wanted: Wanted,
    *,
    changes: Mapping[str, Any],
    max_images: int,
    max_videos: int = 0,
    wants_videos: bool = False,
) -> ImageSpec | None:
    """Read how images are made for such a tower; None: the files do not say it.

    Args:
      changes: the user's mm_processor_kwargs.
      wants_videos: whether videos must be supported. Otherwise there are none if they are not.
    """
    try:
        return _read(model_dir, wanted, changes, max_images, max_videos)
    except UnsupportedVideosError as error:
        if wants_videos:
            raise
        logger.warning("there are no videos in prompts: %s", error)
        return _read(model_dir, wanted, changes, max_images, 0)


def _read(
    model_dir: Path, wanted: Wanted, changes: Mapping[str, Any], max_images: int, max_videos: int
) -> ImageSpec | None:
    processor = _read_optional(model_dir / "processor_config.json")
    of_file = _read_optional(model_dir / FILE)
    # What is nested holds, as in transformers.
    fields = dict(processor.get("image_processor") or {}) or of_file
    tokenizer = model_dir / "tokenizer.json"
    if not fields or not tokenizer.is_file():
        return None
    kind = str(fields.get("image_processor_type", ""))
    if kind.removesuffix("Fast").removesuffix("Pil") != wanted.processor:
        raise UnsupportedModelError(
            f"{FILE}: image_processor_type={shown(kind)} is not supported for this model; start "
            "with language_model_only=True for prompts of text"
        )
    for name in ("do_resize", "do_rescale"):
        if fields.get(name, True) is not True:
            raise UnsupportedModelError(f"{FILE}: {name}={shown(fields[name])} is not supported")
    made_by = PROCESSORS[wanted.processor]
    video = dict(processor.get("video_processor") or {}) or _read_optional(model_dir / VIDEO_FILE)
    video = video or of_file or fields
    files = Files(fields, processor, _token_ids(tokenizer), wanted, changes, video, max_videos)
    mean, std = _normalisation(fields, usual=made_by.normalises)
    spec = ImageSpec(
        patch_size=wanted.patch_size,
        merge=wanted.merge,
        resample=_filter(fields.get("resample", 3)),
        scale=_number(fields, "rescale_factor", 1 / 255),
        mean=mean,
        std=std,
        image_token_id=wanted.image_token_id,
        sees_all=wanted.sees_all,
        only_in_windows=wanted.only_in_windows,
        max_images=max_images,
        **made_by.read(files),
    )
    if spec.video is not None:
        _check_pixels_of_video(files, spec)
    return spec


def _check_pixels_of_video(files: Files, spec: ImageSpec) -> None:
    """Refuse videos whose pixels are not normalised as those of images are."""
    of_images = {"image_mean": [*spec.mean], "image_std": [*spec.std]}
    mean, std = _normalisation(of_images | dict(files.video), usual=True)
    scale = _number(files.video, "rescale_factor", spec.scale)
    resample = _filter(files.video.get("resample", spec.resample))
    if (mean, std, scale, resample) != (spec.mean, spec.std, spec.scale, spec.resample):
        raise UnsupportedVideosError(
            "videos are resized or normalised otherwise than images, which is not supported"
        )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_ids(path: Path) -> dict[str, int]:
    """The added tokens of a tokenizer."""
    added = read_json(path, most=_MAX_TOKENIZER_BYTES).get("added_tokens") or []
    found = {one.get("content"): one.get("id") for one in added if isinstance(one, dict)}
    return {
        token: number
        for token, number in found.items()
        if isinstance(token, str) and isinstance(number, int) and number >= 0
    }


def _filter(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 5:
        raise UnsupportedModelError(f"{FILE}: resample={shown(value)} is not one of Pillow's")
    return value


def _number(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise CheckpointError(f"{FILE}: {name}={shown(value)} must be a number above zero")
    return float(value)


def _normalisation(
    fields: Mapping[str, Any], *, usual: bool
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """The mean and the deviation of each channel. Some models leave pixels as they are."""
    normalises = fields.get("do_normalize")
    if normalises not in (None, True, False):
        raise CheckpointError(f"{FILE}: do_normalize={shown(normalises)} must be true or false")
    if usual if normalises is None else normalises:
        mean = fields.get("image_mean")
        if mean == [0, 0, 0]:
            return (0.0, 0.0, 0.0), _numbers(fields, "image_std")
        return _numbers(fields, "image_mean"), _numbers(fields, "image_std")
    return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


def _numbers(fields: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    values = fields.get(name)
    if not isinstance(values, list) or len(values) != 3:
        raise CheckpointError(f"{FILE}: {name}={shown(values)} must be three numbers")
    red, green, blue = (_number({name: value}, name, 0.0) for value in values)
    return red, green, blue
