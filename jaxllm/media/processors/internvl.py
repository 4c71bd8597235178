"""Reads the files of InternVL's processor, which cuts an image into tiles."""

from typing import Any

from jaxllm.errors import CheckpointError, UnsupportedModelError, refused, shown
from jaxllm.media.processors.files import (
    FILE,
    Files,
    check_equal,
    check_known,
    image_token,
    is_count,
    square_edge,
)
from jaxllm.media.resizing import Tiles

# What is put around the embeddings of an image.
_AROUND_TILES = ("<img>", "</img>")
_MOST_TILES = 64


def read(files: Files) -> dict[str, Any]:
    """What the files say: how many tiles an image has, each a square of one size."""
    # crop_to_patches is not asked: InternVLProcessor cuts images, whatever this file says.
    edge = square_edge(files)
    of_tile = (edge // files.wanted.patch_size // files.wanted.merge) ** 2
    check_equal("processor_config.json", files.processor, "image_seq_length", of_tile)
    check_known(files.changes, ("max_patches",))
    least, most = files.fields.get("min_patches", 1), files.fields.get("max_patches", 12)
    if not is_count(least) or not is_count(most) or not least <= most <= _MOST_TILES:
        raise UnsupportedModelError(
            f"{FILE}: min_patches={shown(least)} and max_patches={shown(most)} must be numbers of "
            f"tiles, one after the other, up to {_MOST_TILES}"
        )
    fewer = files.changes.get("max_patches", most)
    if not is_count(fewer) or not least <= fewer <= most:
        raise refused(
            "mm_processor_kwargs.max_patches",
            fewer,
            f"it must be a number of tiles from {least} to {most}, as the model was trained",
        )
    token = image_token(files)
    for around in _AROUND_TILES:
        if around not in files.ids:
            raise CheckpointError(f"tokenizer.json: there is no token {shown(around)}")
    return {
        "resizing": Tiles(pixels=edge, min_tiles=least, max_tiles=fewer),
        "image_token": token,
        "written": (token, token.join(_AROUND_TILES)),
    }
