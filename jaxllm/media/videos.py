"""Videos of a request: a file, a directory of frames, or frames that Python has, become clips."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ValidationError, refused
from jaxllm.media.chat import NamedImage
from jaxllm.media.decode import in_rgb, of_array, to_clip
from jaxllm.media.decode_process import DecodeProcess
from jaxllm.media.fetch import MAX_VIDEO_BYTES
from jaxllm.media.frames import Clip, Room, VideoSpec, read_metadata
from jaxllm.media.item import ImageSpec
from jaxllm.media.resizing import UndecodableError
from jaxllm.media.sources import read_file, read_url
from jaxllm.media_config import MediaConfig

_SCHEMES = ("data:", "http:", "https:", "file:")


def as_videos(given: object) -> list[Any]:
    """The videos of `multi_modal_data`: one, or a list. A list of images is one, of its frames."""
    if given is None:
        return []
    if isinstance(given, list) and not (given and all(map(_is_frame, given))):
        return given
    return [given]


def read_video(
    name: str, given: Any, spec: ImageSpec, decoder: DecodeProcess, config: MediaConfig,
    room: Room,
) -> Clip:  # fmt: skip
    """Make a clip of a video that has room in its prompt; raise ValidationError, which calls it
    `name`."""
    try:
        return _read(name, given, spec, decoder, config, room)
    except UndecodableError as error:
        raise ValidationError(f"{name}: {error}", parameter=name) from None


def _read(
    name: str, given: Any, spec: ImageSpec, decoder: DecodeProcess, config: MediaConfig,
    room: Room,
) -> Clip:  # fmt: skip
    is_url = isinstance(given, NamedImage) and given.is_url
    if isinstance(given, NamedImage):
        given = given.given
    says: Any = {}
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping | None):
        given, says = given[0], given[1] or {}
    if isinstance(given, str | os.PathLike):
        is_url = is_url or (isinstance(given, str) and given.startswith(_SCHEMES))
        if not is_url and _is_directory(given):
            return _of_directory(name, Path(given), says, spec, decoder, room)
        if says:
            raise refused(name, says, "a file says itself what its frames are")
        if is_url:
            return decoder.video(read_url(str(given), config, MAX_VIDEO_BYTES), room)
        return decoder.video(read_file(given, MAX_VIDEO_BYTES), room)
    if isinstance(given, np.ndarray) and given.ndim == 4:
        if not len(given):
            raise refused(name, f"an array {given.shape}", "it has no frames")
        return _of_frames(name, given, says, spec, room)
    if isinstance(given, list | tuple) and given and all(map(_is_frame, given)):
        return _of_frames(name, given, says, spec, room)
    raise refused(
        name,
        f"an array {given.shape}" if isinstance(given, np.ndarray) else given,
        "it must be an array of frames, rows, columns and channels, a list of images, a directory "
        "of them, the path of a file or a URL",
    )


def _is_directory(given: str | os.PathLike[str]) -> bool:
    try:
        return Path(given).is_dir()
    except OSError:  # it is too long, or forbidden
        return False


def _of_frames(
    name: str, frames: Sequence[Any] | np.ndarray, says: object, spec: ImageSpec, room: Room
) -> Clip:
    its = _video(spec)
    chosen, times = _chosen(name, len(frames), says, its)
    images = (_image(name, frames[place]) for place in chosen)
    first = _image(name, frames[chosen[0]])
    size = first.height, first.width
    return to_clip(images, size, len(chosen), times, spec, room)


def _of_directory(
    name: str, path: Path, says: object, spec: ImageSpec, decoder: DecodeProcess, room: Room
) -> Clip:
    try:
        files = sorted(one for one in path.iterdir() if one.is_file())
    except OSError:
        raise UndecodableError("there is no such directory that can be read") from None
    if not files:
        raise refused(name, str(path), "there are no files of frames in this directory")
    chosen, times = _chosen(name, len(files), says, _video(spec))
    found: list[bytes] = []
    left = MAX_VIDEO_BYTES
    for place in chosen:
        found.append(read_file(files[place], left))
        left -= len(found[-1])
    return decoder.frames(found, times, room)


def _chosen(name: str, number: int, says: object, spec: VideoSpec) -> tuple[list[int], Any]:
    """Which of so many frames are seen, and when: all of them, unless the user says that they are
    to be sampled."""
    known = read_metadata(name, says, number, spec)
    if known.samples:
        chosen = spec.sampled(number, known.fps)
        return chosen, spec.times_of(number, known.fps, chosen)
    if number > spec.max_frames:
        raise refused(
            name,
            f"{number} frames",
            f"a video may have {spec.max_frames}; give fewer, or let them be sampled: "
            "(frames, {'fps': ..., 'do_sample_frames': True})",
        )
    return list(range(number)), spec.times_of(known.total, known.fps, known.indices)


def _video(spec: ImageSpec) -> VideoSpec:
    assert spec.video is not None, "videos are allowed"
    return spec.video


def _is_frame(given: object) -> bool:
    if isinstance(given, np.ndarray):
        return given.ndim in (2, 3)
    return hasattr(given, "convert") and hasattr(given, "resize")


def _image(name: str, frame: Any) -> Any:
    return in_rgb(of_array(name, frame) if isinstance(frame, np.ndarray) else frame)
