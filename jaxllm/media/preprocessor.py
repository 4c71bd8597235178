"""Reads what a model's directory says of images, in the files of transformers' processors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.errors import CheckpointError, UnsupportedModelError, refused, shown
from jaxllm.files import read_json
from jaxllm.media.item import ImageSpec
from jaxllm.media.resizing import Area, LongestEdge, Square, Tiles, TokenBudget

_MAX_TOKENIZER_BYTES = 1 << 28
_FILE = "preprocessor_config.json"
# The names of Pixtral's tokens, unless processor_config.json has others.
_TOKENS = {
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
_HIGHEST_EDGE = 1 << 13
_HIGHEST_AREA = 1 << 26
# What stands for an image in a text of Gemma's, its embeddings, and its end.
_OF_GEMMA = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
_OF_GEMMA_4 = "Gemma4ImageProcessor"
_BUDGETS = (70, 140, 280, 560, 1120)  # the numbers of tokens of an image that Gemma 4 has learned
# What is put around the embeddings of an image of InternVL's.
_AROUND_TILES = ("<img>", "</img>")
_MOST_TILES = 64
_OF_AREA = ("size", "min_pixels", "max_pixels")


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


def read_image_spec(
    model_dir: Path, wanted: Wanted, *, changes: Mapping[str, Any], max_images: int
) -> ImageSpec | None:
    """Read how images are made for such a tower; None: the files do not say it.

    Args:
      changes: the user's mm_processor_kwargs.
    """
    processor = _read_optional(model_dir / "processor_config.json")
    fields = _read_optional(model_dir / _FILE) or dict(processor.get("image_processor") or {})
    tokenizer = model_dir / "tokenizer.json"
    if not fields or not tokenizer.is_file():
        return None
    kind = str(fields.get("image_processor_type", ""))
    if kind.removesuffix("Fast").removesuffix("Pil") != wanted.processor:
        raise UnsupportedModelError(
            f"{_FILE}: image_processor_type={shown(kind)} is not supported for this model; start "
            "with language_model_only=True for prompts of text"
        )
    for name in ("do_resize", "do_rescale"):
        if fields.get(name, True) is not True:
            raise UnsupportedModelError(f"{_FILE}: {name}={shown(fields[name])} is not supported")
    ids = _token_ids(tokenizer)
    read = _PROCESSORS[wanted.processor]
    mean, std = _normalisation(fields, usual=wanted.processor != _OF_GEMMA_4)
    return ImageSpec(
        patch_size=wanted.patch_size,
        merge=wanted.merge,
        resample=_filter(fields.get("resample", 3)),
        scale=_number(fields, "rescale_factor", 1 / 255),
        mean=mean,
        std=std,
        image_token_id=wanted.image_token_id,
        sees_all=wanted.sees_all,
        only_in_windows=wanted.only_in_windows,
        max_images=max_images,
        **read(fields, processor, wanted, ids, changes),
    )


def _read_pixtral(
    fields: Mapping[str, Any],
    processor: Mapping[str, Any],
    wanted: Wanted,
    ids: Mapping[str, int],
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    for name, value in (("patch_size", wanted.patch_size), ("spatial_merge_size", wanted.merge)):
        _check_equal("processor_config.json", processor, name, value)
    _check_known(changes, ("size",))
    edge = _longest_edge(fields.get("size", {"longest_edge": 1024}))
    if edge is None:
        raise UnsupportedModelError(f"{_FILE}: size={shown(fields['size'])} is not supported")
    if "size" in changes:
        smaller = _longest_edge(changes["size"])
        if smaller is None or smaller > edge:
            raise refused(
                "mm_processor_kwargs.size",
                changes["size"],
                f'it must be {{"longest_edge": pixels}}, at most {edge}, as the model was trained',
            )
        edge = smaller
    names = {name: processor.get(name, usual) for name, usual in _TOKENS.items()}
    for name, token in names.items():
        if token not in ids:
            raise CheckpointError(f"tokenizer.json: there is no token {shown(token)} ({name})")
    of_image = ids[names["image_token"]]
    if of_image != wanted.image_token_id:
        raise CheckpointError(
            f"tokenizer.json: {names['image_token']!r} is the token {of_image}, where "
            f"config.json has {wanted.image_token_id}"
        )
    return {
        "resizing": LongestEdge(edge),
        "image_token": names["image_token"],
        "break_token_id": ids[names["image_break_token"]],
        "end_token_id": ids[names["image_end_token"]],
    }


def _read_qwen(
    fields: Mapping[str, Any],
    processor: Mapping[str, Any],
    wanted: Wanted,
    ids: Mapping[str, int],
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    for name, value in (
        ("patch_size", wanted.patch_size),
        ("merge_size", wanted.merge),
        ("temporal_patch_size", 2),
    ):
        _check_equal(_FILE, fields, name, value)
    _check_known(changes, _OF_AREA)
    area = _read_area(fields, Area(min_pixels=56 * 56, max_pixels=28 * 28 * 1280))
    if area is None:
        asked = {name: fields[name] for name in _OF_AREA if name in fields}
        raise UnsupportedModelError(f"{_FILE}: the areas of {shown(asked)} are not supported")
    changed = _read_area(changes, area)
    if changed is None or changed.max_pixels > area.max_pixels:
        raise refused(
            "mm_processor_kwargs",
            dict(changes),
            'it must be {"min_pixels": number, "max_pixels": number}, or {"size": '
            '{"shortest_edge": number, "longest_edge": number}} for the same areas; min_pixels '
            f"({area.min_pixels} by default) is at most max_pixels, and max_pixels is at most "
            f"{area.max_pixels}, as the model was trained",
        )
    token = _image_token(ids, wanted)
    return {"resizing": changed, "image_token": token, "has_grid_positions": True}


def _read_gemma(
    fields: Mapping[str, Any],
    processor: Mapping[str, Any],
    wanted: Wanted,
    ids: Mapping[str, int],
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    edge = _square_edge(fields, wanted)
    if fields.get("do_pan_and_scan"):
        raise UnsupportedModelError(f"{_FILE}: do_pan_and_scan is not supported; set it to false")
    _check_equal(
        _FILE, fields, "image_seq_length", (edge // wanted.patch_size // wanted.merge) ** 2
    )
    _check_known(changes, ())
    for token in _OF_GEMMA:
        if token not in ids:
            raise CheckpointError(f"tokenizer.json: there is no token {shown(token)}")
    mark, soft, end = _OF_GEMMA
    if ids[soft] != wanted.image_token_id:
        raise CheckpointError(
            f"tokenizer.json: {soft!r} is the token {ids[soft]}, where config.json has "
            f"{wanted.image_token_id}"
        )
    return {
        "resizing": Square(edge),
        "image_token": soft,
        "written": (mark, f"\n\n{mark}{soft}{end}\n\n"),
    }


def _read_gemma4(
    fields: Mapping[str, Any],
    processor: Mapping[str, Any],
    wanted: Wanted,
    ids: Mapping[str, int],
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    for name, value in (
        ("patch_size", wanted.patch_size), ("pooling_kernel_size", wanted.merge),
    ):  # fmt: skip
        _check_equal(_FILE, fields, name, value)
    tokens = fields.get("max_soft_tokens", 280)
    if tokens not in _BUDGETS:
        raise UnsupportedModelError(f"{_FILE}: max_soft_tokens={shown(tokens)} is not supported")
    _check_known(changes, ("max_soft_tokens",))
    changed = changes.get("max_soft_tokens", tokens)
    if isinstance(changed, bool) or changed not in _BUDGETS:
        may = ", ".join(map(str, _BUDGETS))
        raise refused("mm_processor_kwargs.max_soft_tokens", changed, f"it must be one of {may}")
    assert wanted.marks is not None, "its config.json has them"
    names = {number: name for name, number in ids.items()}
    of_image = (wanted.marks[0], wanted.image_token_id, wanted.marks[1])
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


def _read_tiles(
    fields: Mapping[str, Any],
    processor: Mapping[str, Any],
    wanted: Wanted,
    ids: Mapping[str, int],
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    # crop_to_patches is not asked: InternVLProcessor cuts images, whatever this file says.
    edge = _square_edge(fields, wanted)
    of_tile = (edge // wanted.patch_size // wanted.merge) ** 2
    _check_equal("processor_config.json", processor, "image_seq_length", of_tile)
    _check_known(changes, ("max_patches",))
    least, most = fields.get("min_patches", 1), fields.get("max_patches", 12)
    if not _is_count(least) or not _is_count(most) or not least <= most <= _MOST_TILES:
        raise UnsupportedModelError(
            f"{_FILE}: min_patches={shown(least)} and max_patches={shown(most)} must be numbers of "
            f"tiles, one after the other, up to {_MOST_TILES}"
        )
    fewer = changes.get("max_patches", most)
    if not _is_count(fewer) or not least <= fewer <= most:
        raise refused(
            "mm_processor_kwargs.max_patches",
            fewer,
            f"it must be a number of tiles from {least} to {most}, as the model was trained",
        )
    token = _image_token(ids, wanted)
    for around in _AROUND_TILES:
        if around not in ids:
            raise CheckpointError(f"tokenizer.json: there is no token {shown(around)}")
    return {
        "resizing": Tiles(pixels=edge, min_tiles=least, max_tiles=fewer),
        "image_token": token,
        "written": (token, token.join(_AROUND_TILES)),
    }


_PROCESSORS = {
    _OF_GEMMA_4: _read_gemma4,
    "Gemma3ImageProcessor": _read_gemma,
    "GotOcr2ImageProcessor": _read_tiles,
    "PixtralImageProcessor": _read_pixtral,
    "Qwen2VLImageProcessor": _read_qwen,
}


def _square_edge(fields: Mapping[str, Any], wanted: Wanted) -> int:
    """The pixels of the edges of images that are squares of one size."""
    edge = wanted.image_size
    assert edge is not None, "its tower says how large images are"
    if fields.get("size") != {"height": edge, "width": edge}:
        raise CheckpointError(
            f"{_FILE}: size={shown(fields.get('size'))}, where config.json has images of {edge} x "
            f"{edge} pixels"
        )
    return edge


def _image_token(ids: Mapping[str, int], wanted: Wanted) -> str:
    """The token that config.json names by its number."""
    token = next((name for name, its in ids.items() if its == wanted.image_token_id), None)
    if token is None:
        raise CheckpointError(
            f"tokenizer.json: there is no token {wanted.image_token_id}, which config.json names "
            "as image_token_id"
        )
    return token


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_equal(file: str, fields: Mapping[str, Any], name: str, value: int) -> None:
    if fields.get(name, value) != value:
        raise CheckpointError(
            f"{file}: {name}={shown(fields[name])}, where config.json has {value}"
        )


def _check_known(changes: Mapping[str, Any], names: tuple[str, ...]) -> None:
    if unknown := changes.keys() - set(names):
        may = " and ".join(map(repr, names))
        why = f"only {may} may be changed" if names else "nothing may be changed"
        raise refused("mm_processor_kwargs", sorted(map(str, unknown)), why)


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


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _longest_edge(size: object) -> int | None:
    if not isinstance(size, Mapping) or set(size) != {"longest_edge"}:
        return None
    edge: Any = size["longest_edge"]
    is_number = isinstance(edge, int) and not isinstance(edge, bool)
    return edge if is_number and 0 < edge <= _HIGHEST_EDGE else None


def _token_ids(path: Path) -> dict[str, int]:
    """The added tokens of a tokenizer."""
    added = read_json(path, most=_MAX_TOKENIZER_BYTES).get("added_tokens") or []
    found = {one.get("content"): one.get("id") for one in added if isinstance(one, dict)}
    return {
        token: number
        for token, number in found.items()
        if isinstance(token, str) and isinstance(number, int) and number >= 0
    }


def _filter(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 5:
        raise UnsupportedModelError(f"{_FILE}: resample={shown(value)} is not one of Pillow's")
    return value


def _number(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise CheckpointError(f"{_FILE}: {name}={shown(value)} must be a number above zero")
    return float(value)


def _normalisation(
    fields: Mapping[str, Any], *, usual: bool
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """The mean and the deviation of each channel. Some models leave pixels as they are."""
    normalises = fields.get("do_normalize")
    if normalises not in (None, True, False):
        raise CheckpointError(f"{_FILE}: do_normalize={shown(normalises)} must be true or false")
    if usual if normalises is None else normalises:
        mean = fields.get("image_mean")
        if mean == [0, 0, 0]:
            return (0.0, 0.0, 0.0), _numbers(fields, "image_std")
        return _numbers(fields, "image_mean"), _numbers(fields, "image_std")
    return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


def _numbers(fields: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    values = fields.get(name)
    if not isinstance(values, list) or len(values) != 3:
        raise CheckpointError(f"{_FILE}: {name}={shown(values)} must be three numbers")
    red, green, blue = (_number({name: value}, name, 0.0) for value in values)
    return red, green, blue
