"""Reads the files of Qwen's processors, which limit the area of an image, and that of a video."""

from collections.abc import Mapping
from typing import Any

from jaxllm.errors import UnsupportedModelError, refused, shown
from jaxllm.media.frames import VideoSpec
from jaxllm.media.processors.files import (
    FILE,
    VIDEO_FILE,
    Files,
    UnsupportedVideosError,
    check_equal,
    check_known,
    image_token,
    is_count,
)
from jaxllm.media.resizing import Area, TotalArea

_HIGHEST_AREA = 1 << 26
_OF_AREA = ("size", "min_pixels", "max_pixels")
_OF_FRAMES = ("fps", "num_frames", "min_frames", "max_frames")
_OF_VIDEOS = "videos_kwargs"
_USUAL_FPS = 2.0
_MOST_FRAMES = 768  # that a model sees of a video


def read(files: Files) -> dict[str, Any]:
    """What the files say: the least and the largest area, and how videos are made."""
    _check_patches(FILE, files.fields, files)
    check_known(files.changes, (*_OF_AREA, *_OF_FRAMES, _OF_VIDEOS))
    area = _read_area(files.fields, Area(min_pixels=56 * 56, max_pixels=28 * 28 * 1280))
    if area is None:
        asked = {name: files.fields[name] for name in _OF_AREA if name in files.fields}
        raise UnsupportedModelError(f"{FILE}: the areas of {shown(asked)} are not supported")
    its = {name: value for name, value in files.changes.items() if name in _OF_AREA}
    changed = _read_area(its, area)
    if changed is None or changed.max_pixels > area.max_pixels:
        raise refused(
            "mm_processor_kwargs",
            its,
            'it must be {"min_pixels": number, "max_pixels": number}, or {"size": '
            '{"shortest_edge": number, "longest_edge": number}} for the same areas; min_pixels '
            f"({area.min_pixels} by default) is at most max_pixels, and max_pixels is at most "
            f"{area.max_pixels}, as the model was trained",
        )
    token = image_token(files)
    return {
        "resizing": changed,
        "image_token": token,
        "has_grid_positions": True,
        "video": _read_video(files),
    }


def _check_patches(file: str, fields: Mapping[str, Any], files: Files) -> None:
    for name, value in (
        ("patch_size", files.wanted.patch_size),
        ("merge_size", files.wanted.merge),
        ("temporal_patch_size", 2),
    ):
        check_equal(file, fields, name, value)


def _read_video(files: Files) -> VideoSpec | None:
    """How videos are made; None: the user wants none, or the tokenizer has no token for them."""
    tokens, of_videos = files.wanted.video, _of_videos(files.changes.get(_OF_VIDEOS, {}))
    changes = _read_changes({**files.changes, **of_videos})
    names = {number: name for name, number in files.ids.items()}
    if tokens is None or not files.max_videos or tokens.token_id not in names:
        return None
    fields = files.video
    try:
        _check_patches(VIDEO_FILE, fields, files)
    except UnsupportedModelError as error:
        raise UnsupportedVideosError(str(error)) from None
    in_words = tokens.positions_per_second is None
    kind, side = ("Qwen3VL", 32) if in_words else ("Qwen2VL", 28)
    if fields.get("video_processor_type", f"{kind}VideoProcessor") != f"{kind}VideoProcessor":
        its = shown(fields["video_processor_type"])
        raise UnsupportedVideosError(f"video_processor_type={its} is not supported")
    if fields.get("cap_pixels_per_frame"):
        raise UnsupportedVideosError("cap_pixels_per_frame is not supported")
    usual = Area(min_pixels=128 * side * side, max_pixels=768 * side * side)
    area = _read_area(fields, usual)
    if area is None:
        raise UnsupportedVideosError("the areas of videos in it are not supported")
    changed = _read_area({name: of_videos[name] for name in _OF_AREA if name in of_videos}, area)
    if changed is None or changed.max_pixels > area.max_pixels:
        why = f"the areas must be numbers of pixels, the largest at most {area.max_pixels}"
        raise refused(f"mm_processor_kwargs.{_OF_VIDEOS}", of_videos, why)
    # transformers may write null.
    said = {name: its for name in _OF_FRAMES if (its := fields.get(name)) is not None}
    for name, its in said.items():
        if not _is_fps(its) if name == "fps" else not _is_number_of_frames(its):
            raise UnsupportedVideosError(f"{name}={shown(its)} is not supported")
    if "fps" in changes:
        said.pop("num_frames", None)
    frames = {"fps": _USUAL_FPS, "min_frames": 4, "max_frames": _MOST_FRAMES} | said | changes
    number, most = frames.get("num_frames"), frames["max_frames"]
    for name in ("num_frames", "min_frames"):
        if name in changes and frames[name] > most:
            raise refused(f"mm_processor_kwargs.{name}", frames[name], f"max_frames is {most}")
    return VideoSpec(
        resizing=TotalArea(changed.min_pixels, changed.max_pixels) if in_words else changed,
        token=names[tokens.token_id],
        token_id=tokens.token_id,
        start_id=tokens.start_id,
        end_id=tokens.end_id,
        positions_per_second=tokens.positions_per_second,
        fps=float(frames["fps"]),
        num_frames=number,
        min_frames=frames["min_frames"],
        max_frames=most,
        max_videos=files.max_videos,
    )


def _of_videos(given: object) -> dict[str, Any]:
    """What the user changes for videos alone."""
    if isinstance(given, Mapping) and given.keys() <= {*_OF_AREA, *_OF_FRAMES}:
        return dict(given)
    may = ", ".join((*_OF_AREA, *_OF_FRAMES))
    raise refused(f"mm_processor_kwargs.{_OF_VIDEOS}", given, f"it may have {may}")


def _read_changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the user says of frames."""
    changes = {name: its for name in _OF_FRAMES if (its := given.get(name)) is not None}
    for name, its in changes.items():
        if name == "fps" and not _is_fps(its):
            raise refused("mm_processor_kwargs.fps", its, "it must be a number from 0.001 to 10000")
        if name != "fps" and not _is_number_of_frames(its):
            why = f"it must be a number from 1 to {_MOST_FRAMES}"
            raise refused(f"mm_processor_kwargs.{name}", its, why)
    if {"fps", "num_frames"} <= changes.keys():
        raise refused("mm_processor_kwargs.fps", changes["fps"], "num_frames says otherwise")
    return changes


def _is_fps(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-3 <= value <= 1e4


def _is_number_of_frames(value: Any) -> bool:
    return is_count(value) and value <= _MOST_FRAMES


def _read_area(fields: Mapping[str, Any], default: Area) -> Area | None:
    """The areas between which images stay: by older names, or as if they were edges. transformers
    may write null for a field that it does not use. None: the areas are malformed."""
    size = {} if fields.get("size") is None else fields["size"]
    names = ("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")
    if not isinstance(size, Mapping) or not set(size) <= {*names[0], *names[1]}:
        return None
    beside = {name: fields.get(name) for pair in names for name in pair}
    given = {**size, **{name: value for name, value in beside.items() if value is not None}}
    least, most = (
        given.get(older, given.get(newer, usual))
        for (older, newer), usual in zip(
            names, (default.min_pixels, default.max_pixels), strict=True
        )
    )
    for value in (least, most):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _HIGHEST_AREA:
            return None
    return Area(min_pixels=least, max_pixels=most) if least <= most else None
