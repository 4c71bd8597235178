"""From the bytes of a video file to pixels in patches.

FFmpeg has demuxers that open other files and addresses: playlists, lists of files. So a file's kind
is known by its first bytes, and only containers that hold their frames themselves are opened. What
a file claims to be is checked before anything is decoded, and every frame is held to it.
"""

import importlib
import io
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ValidationError
from jaxllm.media.decode import to_clip
from jaxllm.media.frames import MAX_FRAMES_OF_FILE, Clip, Room, usual_fps
from jaxllm.media.item import ImageSpec
from jaxllm.media.resizing import UndecodableError

if TYPE_CHECKING:
    from PIL.Image import Image

# The most pixels of a frame, as the header tells them: a decoder may keep 16 frames of them.
MAX_FRAME_PIXELS = 1 << 24
_DAMAGED = "the file is damaged, or its end is missing"
_NUM_THREADS = 2  # each reserves memory, which is limited


def pyav() -> Any:
    """Import PyAV, which comes with jaxllm[video]."""
    try:
        return importlib.import_module("av")
    except ImportError:
        raise ValidationError(
            "videos in files need PyAV: pip install 'jaxllm[video]'; frames can be given as arrays "
            "without it",
            parameter="multi_modal_data",
        ) from None


def decode_video(data: bytes, spec: ImageSpec, room: Room) -> Clip:
    """Decode the frames of a file that the model sees; raise UndecodableError."""
    library, kind = pyav(), _kind(data)
    try:
        with library.open(
            io.BytesIO(data), format=kind, metadata_errors="ignore", io_open=_open_nothing
        ) as container:
            return _clip(container, spec, room)
    except (UndecodableError, MemoryError):
        raise
    except Exception:  # libraries raise anything
        raise UndecodableError(_DAMAGED) from None


def _open_nothing(*args: Any) -> Any:
    raise UndecodableError("it names other files")


def _kind(data: bytes) -> str:
    if data[4:8] == b"ftyp":
        return "mp4"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    raise UndecodableError("it is not a video file; it may be one of MP4, MOV, WebM, Matroska, AVI")


def _clip(container: Any, spec: ImageSpec, room: Room) -> Clip:
    its = spec.video
    assert its is not None, "videos are allowed"
    if not container.streams.video:
        raise UndecodableError(f"there is no video in the file, or {_DAMAGED}")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise UndecodableError(f"there is no decoder for its frames, or {_DAMAGED}")
    width, height = stream.codec_context.width, stream.codec_context.height
    if not width or not height:
        raise UndecodableError(_DAMAGED)
    if width * height > MAX_FRAME_PIXELS:
        raise UndecodableError(
            f"its frames have {width} x {height} pixels; at most {MAX_FRAME_PIXELS} are allowed"
        )
    total = stream.frames if stream.frames > MAX_FRAMES_OF_FILE else _count(container, stream)
    if not 0 < total <= MAX_FRAMES_OF_FILE:
        raise UndecodableError(
            f"it has {total} frames; from 1 to {MAX_FRAMES_OF_FILE} are allowed in a file"
        )
    fps = usual_fps(float(stream.average_rate) if stream.average_rate else None)
    chosen = its.sampled(total, fps)
    stream.codec_context.thread_count = _NUM_THREADS
    images = _frames(container, stream, chosen)
    first = next(images, None)
    if first is None:
        raise UndecodableError(_DAMAGED)
    # A frame may be turned, as images may.
    if sorted((first.height, first.width)) != sorted((height, width)):
        raise UndecodableError("its frames are of several sizes")

    def all_of_them() -> Iterator["Image"]:
        yield first
        yield from images

    size = first.height, first.width
    times = its.times_of(total, fps, chosen)
    return to_clip(all_of_them(), size, len(chosen), times, spec, room)


def _count(container: Any, stream: Any) -> int:
    """The frames that are shown: one of each packet, but for those that a cut has hidden, which are
    still in the file."""
    packets = shown = 0
    for packet in container.demux(stream):
        packets += packet.size > 0
        shown += packet.size > 0 and not packet.is_discard
        if packets > MAX_FRAMES_OF_FILE:
            return packets
    if packets < stream.frames:
        raise UndecodableError(_DAMAGED)
    container.seek(0)
    return shown


def _frames(container: Any, stream: Any, chosen: Sequence[int]) -> Iterator["Image"]:
    """The chosen frames, turned as the file says."""
    left = list(chosen)
    for index, frame in enumerate(container.decode(stream)):
        image = None
        while left and left[0] == index:
            left.pop(0)
            if image is None:
                image = _upright(frame)
            yield image
        if not left:
            return
    raise UndecodableError(_DAMAGED)


def _upright(frame: Any) -> "Image":
    if frame.width * frame.height > MAX_FRAME_PIXELS:
        raise UndecodableError("its frames are of several sizes")
    image = frame.to_image()
    turned = math.floor(frame.rotation / 90 + 0.5) % 4  # in quarters, against the clock
    return image.rotate(90 * turned, expand=True) if turned else image
