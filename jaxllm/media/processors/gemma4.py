"""Reads the files of Gemma 4's processor, which gives every image a number of tokens."""

from typing import Any

from jaxllm.errors import CheckpointError, UnsupportedModelError, refused, shown
from jaxllm.media.processors.files import FILE, Files, check_equal, check_known
from jaxllm.media.resizing import TokenBudget

_BUDGETS = (70, 140, 280, 560, 1120)  # the numbers of tokens of an image that the model has learned


def read(files: Files) -> dict[str, Any]:
    """What the files say: images that keep their ratio, and their number of tokens."""
    for name, value in (
        ("patch_size", files.wanted.patch_size), ("pooling_kernel_size", files.wanted.merge),
    ):  # fmt: skip
        check_equal(FILE, files.fields, name, value)
    tokens = files.fields.get("max_soft_tokens", 280)
    if tokens not in _BUDGETS:
        raise UnsupportedModelError(f"{FILE}: max_soft_tokens={shown(tokens)} is not supported")
    check_known(files.changes, ("max_soft_tokens",))
    changed = files.changes.get("max_soft_tokens", tokens)
    if isinstance(changed, bool) or changed not in _BUDGETS:
        may = ", ".join(map(str, _BUDGETS))
        raise refused("mm_processor_kwargs.max_soft_tokens", changed, f"it must be one of {may}")
    assert files.wanted.marks is not None, "its config.json has them"
    names = {number: name for name, number in files.ids.items()}
    of_image = (files.wanted.marks[0], files.wanted.image_token_id, files.wanted.marks[1])
    for number in of_image:
        if number not in names:
            raise CheckpointError(
                f"tokenizer.json: there is no token {number}, which config.json names for images"
            )
    before, soft, behind = (names[number] for number in of_image)
    return {
        "resizing": TokenBudget(changed),
        "image_token": soft,
        "written": (soft, f"{before}{soft}{behind}"),
    }
