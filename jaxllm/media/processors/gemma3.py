"""Reads the files of Gemma 3's processor, which makes a square of every image."""

from typing import Any

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.media.processors.files import FILE, Files, check_equal, check_known, square_edge
from jaxllm.media.resizing import Square

# What stands for an image in a text, its embeddings, and its end.
_TOKENS = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")


def read(files: Files) -> dict[str, Any]:
    """What the files say: squares of one size, with marks before and behind."""
    edge = square_edge(files)
    if files.fields.get("do_pan_and_scan"):
        raise UnsupportedModelError(f"{FILE}: do_pan_and_scan is not supported; set it to false")
    check_equal(
        FILE,
        files.fields,
        "image_seq_length",
        (edge // files.wanted.patch_size // files.wanted.merge) ** 2,
    )
    check_known(files.changes, ())
    for token in _TOKENS:
        if token not in files.ids:
            raise CheckpointError(f"tokenizer.json: there is no token {shown(token)}")
    mark, soft, end = _TOKENS
    if files.ids[soft] != files.wanted.image_token_id:
        raise CheckpointError(
            f"tokenizer.json: {soft!r} is the token {files.ids[soft]}, where config.json has "
            f"{files.wanted.image_token_id}"
        )
    return {
        "resizing": Square(edge),
        "image_token": soft,
        "written": (mark, f"\n\n{mark}{soft}{end}\n\n"),
    }
