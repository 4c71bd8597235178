"""From the bytes of an image file to pixels in patches.

What a file claims to be is checked by its header, before anything is decoded. Errors are in our own
words: those of a library may tell what is none of a client's business.
"""

import io
import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxllm.errors import ValidationError, refused
from jaxllm.media.frames import FRAMES, Clip, Room, Times
from jaxllm.media.item import ImageSpec
from jaxllm.media.resizing import Tiles, UndecodableError

if TYPE_CHECKING:
    from PIL.Image import Image

# The most pixels of an image, as its header tells them. Pillow's own limit is four times as high.
MAX_PIXELS = 40_000_000
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


class Patches(NamedTuple):
    """An image as a tower takes it."""

    rows: int  # of patches
    columns: int
    pixels: bytes  # as in ImageItem


def pillow() -> Any:
    """Import Pillow, which comes with jaxllm[images]."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError:
        raise ValidationError(
            "images need Pillow; install jaxllm[images]", parameter="multi_modal_data"
        ) from None
    return PIL


def decode(data: bytes) -> "Image":
    """Decode a file, in RGB and turned as its EXIF says; raise UndecodableError. Of an animation
    the first picture."""
    library = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes, which have a lower limit here
            image = library.Image.open(io.BytesIO(data), formats=_FORMATS)
    except library.Image.DecompressionBombError:
        raise UndecodableError(_TOO_LARGE) from None
    except Exception:  # parsers raise anything
        kinds = ", ".join(_FORMATS)
        raise UndecodableError(f"it is not an image file; it may be one of {kinds}") from None
    if image.width * image.height > MAX_PIXELS:
        raise UndecodableError(f"it has {image.width} x {image.height} pixels; {_TOO_LARGE}")
    try:
        image.load()
        return in_rgb(image)
    except MemoryError:
        raise
    except Exception:
        raise UndecodableError("the file is damaged, or its end is missing") from None


def in_rgb(image: "Image") -> "Image":
    """Turn an image as its EXIF says, and convert it as transformers does: on a white ground."""
    library = pillow()
    upright = library.ImageOps.exif_transpose(image)
    if "A" in upright.getbands() or upright.info.get("transparency") is not None:
        layer = upright.convert("RGBA")
        ground = library.Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return library.Image.alpha_composite(ground, layer).convert("RGB")
    return upright if upright.mode == "RGB" else upright.convert("RGB")


def of_array(name: str, array: np.ndarray) -> "Image":
    """Make an image of an array, uint8 [rows, columns] or [rows, columns, 1, 3 or 4]."""
    shape = array.shape
    is_flat = len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4))
    if array.dtype != np.uint8 or not is_flat or 0 in shape:
        raise refused(
            name,
            f"an array {array.dtype} {shape}",
            "it must be uint8, of rows, columns and, if it has colours, 3 or 4 channels",
        )
    squeezed = array[:, :, 0] if len(shape) == 3 and shape[2] == 1 else array
    return pillow().Image.fromarray(np.ascontiguousarray(squeezed))


def to_patches(image: "Image", spec: ImageSpec) -> Patches:
    """Resize an RGB image and cut it; raise UndecodableError."""
    height, width = spec.resizing.size(image.height, image.width, spec.side)
    pixels = np.asarray(image.resize((width, height), resample=spec.resample))
    if isinstance(spec.resizing, Tiles) and height * width > (edge := spec.resizing.pixels) ** 2:
        tiles = pixels.reshape(height // edge, edge, width // edge, edge, 3).swapaxes(1, 2)
        whole = np.asarray(image.resize((edge, edge), resample=spec.resample))
        pixels = np.concatenate([tiles.reshape(-1, edge, 3), whole])
    return cut(pixels, spec)


def to_clip(
    images: Iterable["Image"], size: tuple[int, int], number: int, times: Times, spec: ImageSpec,
    room: Room,
) -> Clip:  # fmt: skip
    """Resize RGB frames of this height and width and cut them, in pairs; raise UndecodableError.
    So many are wanted; they are made one by one, after their tokens have been counted."""
    assert spec.video is not None, "videos are allowed"
    height, width = spec.video.resizing.frame_size(max(number, FRAMES), *size, spec.side)
    pairs = -(-number // FRAMES)
    num_tokens = pairs * height * width // spec.side**2
    if num_tokens >= room.num_tokens:
        raise UndecodableError(
            f"its {number} frames would have {num_tokens} tokens, of which the prompt has room for "
            f"fewer than {room.num_tokens} (max_model_len={room.max_model_len} without its other "
            "images and videos); give fewer or smaller frames, or make them so by "
            "mm_processor_kwargs"
        )
    found: list[bytes] = []
    patches = Patches(0, 0, b"")
    for pair in _in_pairs(images):
        cuts = []
        for image in pair:
            if (image.height, image.width) != size:
                raise UndecodableError("its frames are of several sizes")
            pixels = np.asarray(image.resize((width, height), resample=spec.resample))
            patches = cut(pixels, spec)
            cuts.append(np.frombuffer(patches.pixels, np.uint8).reshape(-1, 3, spec.patch_size**2))
        found.append(np.stack(cuts, axis=2).tobytes())
    if len(found) != pairs:
        raise UndecodableError("the file is damaged, or its end is missing")
    return Clip(patches.rows, patches.columns, found, times)


def _in_pairs(images: Iterable["Image"]) -> Iterator[list["Image"]]:
    """Take frames in pairs; a last one is doubled."""
    left = iter(images)
    while pair := list(itertools.islice(left, FRAMES)):
        yield (pair * FRAMES)[:FRAMES]


def cut(pixels: np.ndarray, spec: ImageSpec) -> Patches:
    """Cut pixels [height, width, 3] into patches, in the order of ImageItem."""
    size, merge = spec.patch_size, spec.merge
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    blocks = pixels.reshape(rows // merge, merge, size, columns // merge, merge, size, 3)
    ordered = blocks.transpose(0, 3, 1, 4, 6, 2, 5)
    return Patches(rows, columns, ordered.tobytes())


def places(rows: int, columns: int, merge: int) -> np.ndarray:
    """The row and column of each patch, in the order of ImageItem: i32 [P, 2]."""
    grid = np.indices((rows, columns), np.int32).transpose(1, 2, 0)
    squares = grid.reshape(rows // merge, merge, columns // merge, merge, 2)
    return squares.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


_TOO_LARGE = f"at most {MAX_PIXELS} are allowed"
