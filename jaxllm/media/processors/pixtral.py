"""Reads the files of Pixtral's processor, which keeps the ratio of an image's edges."""

from collections.abc import Mapping
from typing import Any

from jaxllm.errors import CheckpointError, UnsupportedModelError, refused, shown
from jaxllm.media.processors.files import FILE, Files, check_equal, check_known
from jaxllm.media.resizing import LongestEdge

# The names of its tokens, unless processor_config.json has others.
_TOKENS = {
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
_HIGHEST_EDGE = 1 << 13


def read(files: Files) -> dict[str, Any]:
    """What the files say: the longest edge, and the tokens between and behind rows."""
    for name, value in (
        ("patch_size", files.wanted.patch_size),
        ("spatial_merge_size", files.wanted.merge),
    ):
        check_equal("processor_config.json", files.processor, name, value)
    check_known(files.changes, ("size",))
    edge = _longest_edge(files.fields.get("size", {"longest_edge": 1024}))
    if edge is None:
        raise UnsupportedModelError(f"{FILE}: size={shown(files.fields['size'])} is not supported")
    if "size" in files.changes:
        smaller = _longest_edge(files.changes["size"])
        if smaller is None or smaller > edge:
            raise refused(
                "mm_processor_kwargs.size",
                files.changes["size"],
                f'it must be {{"longest_edge": pixels}}, at most {edge}, as the model was trained',
            )
        edge = smaller
    names = {name: files.processor.get(name, usual) for name, usual in _TOKENS.items()}
    for name, token in names.items():
        if token not in files.ids:
            raise CheckpointError(f"tokenizer.json: there is no token {shown(token)} ({name})")
    of_image = files.ids[names["image_token"]]
    if of_image != files.wanted.image_token_id:
        raise CheckpointError(
            f"tokenizer.json: {names['image_token']!r} is the token {of_image}, where "
            f"config.json has {files.wanted.image_token_id}"
        )
    return {
        "resizing": LongestEdge(edge),
        "image_token": names["image_token"],
        "break_token_id": files.ids[names["image_break_token"]],
        "end_token_id": files.ids[names["image_end_token"]],
    }


def _longest_edge(size: object) -> int | None:
    if not isinstance(size, Mapping) or set(size) != {"longest_edge"}:
        return None
    edge: Any = size["longest_edge"]
    is_number = isinstance(edge, int) and not isinstance(edge, bool)
    return edge if is_number and 0 < edge <= _HIGHEST_EDGE else None
