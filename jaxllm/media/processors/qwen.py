"""Reads the files of Qwen's processor, which limits the area of an image."""

from collections.abc import Mapping
from typing import Any

from jaxllm.errors import UnsupportedModelError, refused, shown
from jaxllm.media.processors.files import FILE, Files, check_equal, check_known, image_token
from jaxllm.media.resizing import Area

_HIGHEST_AREA = 1 << 26
_OF_AREA = ("size", "min_pixels", "max_pixels")


def read(files: Files) -> dict[str, Any]:
    """What the files say: the least and the largest area."""
    for name, value in (
        ("patch_size", files.wanted.patch_size),
        ("merge_size", files.wanted.merge),
        ("temporal_patch_size", 2),
    ):
        check_equal(FILE, files.fields, name, value)
    check_known(files.changes, _OF_AREA)
    area = _read_area(files.fields, Area(min_pixels=56 * 56, max_pixels=28 * 28 * 1280))
    if area is None:
        asked = {name: files.fields[name] for name in _OF_AREA if name in files.fields}
        raise UnsupportedModelError(f"{FILE}: the areas of {shown(asked)} are not supported")
    changed = _read_area(files.changes, area)
    if changed is None or changed.max_pixels > area.max_pixels:
        raise refused(
            "mm_processor_kwargs",
            dict(files.changes),
            'it must be {"min_pixels": number, "max_pixels": number}, or {"size": '
            '{"shortest_edge": number, "longest_edge": number}} for the same areas; min_pixels '
            f"({area.min_pixels} by default) is at most max_pixels, and max_pixels is at most "
            f"{area.max_pixels}, as the model was trained",
        )
    token = image_token(files)
    return {"resizing": changed, "image_token": token, "has_grid_positions": True}


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
