"""Which frames of a video a model sees, and when they are.

Frames are seen in pairs, each as an image is. Where their number is odd, the last one is doubled.
"""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxllm.errors import refused
from jaxllm.media.resizing import Area, TotalArea

FRAMES = 2  # of a pair
# The most frames that may be in a file, of which a model sees some.
MAX_FRAMES_OF_FILE = 1 << 18
_USUAL_FPS = 24.0  # of a file that does not say it, as transformers has it


class VideoSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's videos become frames and tokens."""

    resizing: Area | TotalArea
    token: str  # stands for a video in the text of a prompt
    token_id: int
    start_id: int  # before the embeddings of a pair, or of a whole video
    end_id: int
    positions_per_second: int | None  # None: pairs have their times in words
    fps: float  # how many frames of a second are seen
    num_frames: int | None  # how many of a video, if it says so
    min_frames: int
    max_frames: int
    max_videos: int  # of a prompt

    def sampled(self, total: int, fps: float) -> list[int]:
        """Choose frames of a video that has so many, and so many in a second."""
        most = min(self.max_frames, total)
        is_even = self.positions_per_second is not None  # in whole pairs, if there is one
        if self.num_frames is None:
            number = min(max(total / fps * self.fps, self.min_frames), most)
        else:
            number = min(round(self.num_frames / FRAMES) * FRAMES if is_even else self.num_frames,
                         most)  # fmt: skip
        if is_even:
            count = max(1, int(number) // FRAMES * FRAMES)
            return [place * total // count for place in range(count)]
        return np.linspace(0, total - 1, int(number)).round().astype(int).tolist()

    def times_of(self, total: int, fps: float, indices: Sequence[int]) -> "Times":
        """When these frames of a video are seen."""
        seconds = [index / fps for index in indices]
        seconds += seconds[-1:] * (len(seconds) % FRAMES)
        firsts, lasts = seconds[::FRAMES], seconds[FRAMES - 1 :: FRAMES]
        middles = [(first + last) / 2 for first, last in zip(firsts, lasts, strict=True)]
        return Times(middles, FRAMES / (len(indices) / total * fps))

    def positions(self, times: "Times") -> list[int]:
        """The positions of pairs behind the first one, where positions tell the time."""
        index = np.arange(len(times.seconds), dtype=np.float32)
        # In float32, as transformers computes it.
        positions = index * np.float32((self.positions_per_second or 0) * times.interval)
        return positions.astype(np.int64).tolist()


class Times(NamedTuple):
    """When the pairs of a video are seen."""

    seconds: list[float]  # the middle of each pair
    interval: float  # the seconds from one pair to the next


class Clip(NamedTuple):
    """A video as a tower takes it."""

    rows: int  # of patches
    columns: int
    pairs: list[bytes]  # the pixels of each pair, as in ImageItem
    times: Times

    @property
    def num_patches(self) -> int:
        return self.rows * self.columns * len(self.pairs)


class Room(NamedTuple):
    """What a prompt has left for a video."""

    num_tokens: int  # it must have fewer
    max_model_len: int


class Metadata(NamedTuple):
    """What a user says of frames: which of a video they are."""

    total: int
    fps: float
    indices: list[int]
    samples: bool  # whether they are all frames of a video, from which some are to be chosen


def read_metadata(name: str, given: object, num_frames: int, spec: VideoSpec) -> Metadata:
    """Read what goes with frames, in the words of transformers' VideoMetadata; what is not said
    follows from frames that were taken at the model's own rate."""
    if not isinstance(given, Mapping):
        raise refused(name, given, "what goes with frames must be a dict, such as {'fps': 2.0}")
    if unknown := given.keys() - set(_NAMES):
        raise refused(name, sorted(map(str, unknown)), f"only {', '.join(_NAMES)} are known")
    _check_unused(name, given)
    samples = given.get("do_sample_frames")
    if not isinstance(samples, bool | np.bool_ | None):
        raise refused(f"{name}.do_sample_frames", samples, "it must be true or false")
    for beside in ("frames_indices", "total_num_frames"):
        if samples and given.get(beside) is not None:
            why = "with do_sample_frames the frames are all of the video's; leave it out"
            raise refused(f"{name}.{beside}", given[beside], why)
    indices = list(range(num_frames))
    if (those := given.get("frames_indices")) is not None:
        indices = _indices(f"{name}.frames_indices", those, num_frames)
    total: Any = given.get("total_num_frames")
    total = indices[-1] + 1 if total is None else total
    if not _is(numbers.Integral, total) or not indices[-1] < total < 1 << 40:
        raise refused(f"{name}.total_num_frames", total, "it must be a number above the indices")
    fps: Any = given.get("fps")
    fps = spec.fps if fps is None else fps
    if not _is(numbers.Real, fps) or not 1e-3 <= fps <= 1e4:
        raise refused(f"{name}.fps", fps, "it must be a number from 0.001 to 10000")
    return Metadata(int(total), float(fps), indices, bool(samples))


def _is(kind: type, value: object) -> bool:
    """Whether a value is such a number, of Python or of numpy."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _check_unused(name: str, given: Mapping[str, Any]) -> None:
    """Refuse malformed values that a model makes nothing of: the frames say it themselves."""
    for field, kind, what in (
        ("duration", numbers.Real, "a number of seconds"),
        ("width", numbers.Integral, "a number of pixels"),
        ("height", numbers.Integral, "a number of pixels"),
        ("video_backend", str, "the name of a library"),
    ):
        value = given.get(field)
        if value is not None and not _is(kind, value):
            raise refused(f"{name}.{field}", value, f"it must be {what}")


def _indices(name: str, given: object, number: int) -> list[int]:
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if isinstance(given, list | tuple) and len(given) == number:
        found = [int(one) for one in given if _is(numbers.Integral, one)]
        if len(found) == number and found == sorted(found) and 0 <= found[0] <= found[-1] < 1 << 31:
            return found
    raise refused(name, given, f"it must be a list of {number} ascending numbers, one a frame")


def usual_fps(fps: float | None) -> float:
    """The rate of a file that may not say it."""
    return fps if fps and 1e-3 <= fps <= 1e4 else _USUAL_FPS


_NAMES = (
    "fps", "frames_indices", "total_num_frames", "do_sample_frames",
    "duration", "width", "height", "video_backend",
)  # fmt: skip
