"""What the readers of all processors have in common: the files of a model's directory, and checks
of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxllm.errors import CheckpointError, UnsupportedModelError, refused, shown

FILE = "preprocessor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"


class UnsupportedVideosError(UnsupportedModelError):
    """The files ask for videos that are not supported. Images are."""

    def __init__(self, why: str):
        super().__init__(f"""{VIDEO_FILE}: {why}; start with limit_mm_per_prompt={{"video": 0}}""")


class VideoWanted(NamedTuple):
    """What config.json says of videos: their tokens, and those before and behind them."""

    token_id: int
    start_id: int
    end_id: int
    positions_per_second: int | None  # None: a pair of frames has its time before it, in words


class Wanted(NamedTuple):
    """What config.json says of a tower's images, with which the other files must agree."""

    processor: str  # the class that makes them, without "Fast" or "Pil" at the end
    patch_size: int
    merge: int
    image_token_id: int
    # The edges of every image, or of every tile of one; None: they keep theirs.
    image_size: int | None = None
    marks: tuple[int, int] | None = None  # the tokens before and behind an image in a text
    sees_all: bool = False  # as ImageSpec has it
    only_in_windows: bool = False
    video: VideoWanted | None = None  # None: there are none


class Files(NamedTuple):
    """What the files say of images, and what the user changes."""

    fields: Mapping[str, Any]  # of preprocessor_config.json
    processor: Mapping[str, Any]  # of processor_config.json
    ids: Mapping[str, int]  # the added tokens of tokenizer.json
    wanted: Wanted
    changes: Mapping[str, Any]  # the user's mm_processor_kwargs
    # What is said of videos; where nothing is, as `fields`.
    video: Mapping[str, Any]
    max_videos: int  # of a prompt, as the user wants


def square_edge(files: Files) -> int:
    """The pixels of the edges of images that are squares of one size."""
    edge = files.wanted.image_size
    assert edge is not None, "its tower says how large images are"
    if files.fields.get("size") != {"height": edge, "width": edge}:
        raise CheckpointError(
            f"{FILE}: size={shown(files.fields.get('size'))}, where config.json has images of "
            f"{edge} x {edge} pixels"
        )
    return edge


def image_token(files: Files) -> str:
    """The token that config.json names by its number."""
    its_id = files.wanted.image_token_id
    token = next((name for name, number in files.ids.items() if number == its_id), None)
    if token is None:
        raise CheckpointError(
            f"tokenizer.json: there is no token {its_id}, which config.json names as image_token_id"
        )
    return token


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_equal(file: str, fields: Mapping[str, Any], name: str, value: int) -> None:
    if fields.get(name, value) != value:
        raise CheckpointError(
            f"{file}: {name}={shown(fields[name])}, where config.json has {value}"
        )


def check_known(changes: Mapping[str, Any], names: tuple[str, ...]) -> None:
    if unknown := changes.keys() - set(names):
        may = " and ".join(map(repr, names))
        why = f"only {may} may be changed" if names else "nothing may be changed"
        raise refused("mm_processor_kwargs", sorted(map(str, unknown)), why)
