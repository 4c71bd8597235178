"""Reads what a model's directory says of images, in the files of transformers' processors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError, UnsupportedModelError, refused, shown
from jaxllm.files import read_json
from jaxllm.media.item import ImageSpec

_MAX_TOKENIZER_BYTES = 1 << 28
_FILE = "preprocessor_config.json"
# The names of the tokens, unless processor_config.json has others.
_TOKENS = {
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
_HIGHEST_EDGE = 1 << 13


def read_image_spec(
    model_dir: Path,
    *,
    patch_size: int,
    merge: int,
    image_token_id: int,
    changes: Mapping[str, Any],
    max_images: int,
) -> ImageSpec | None:
    """Read how images are made for a tower with such patches; None: the files do not say it.

    Args:
      changes: the user's mm_processor_kwargs.
    """
    processor = _read_optional(model_dir / "processor_config.json")
    fields = _read_optional(model_dir / _FILE) or dict(processor.get("image_processor") or {})
    tokenizer = model_dir / "tokenizer.json"
    if not fields or not tokenizer.is_file():
        return None
    kind = str(fields.get("image_processor_type", ""))
    if not kind.startswith("PixtralImageProcessor"):
        raise UnsupportedModelError(
            f"{_FILE}: image_processor_type={shown(kind)} is not supported for this model; start "
            "with language_model_only=True for prompts of text"
        )
    for name, value in (("patch_size", patch_size), ("spatial_merge_size", merge)):
        if processor.get(name, value) != value:
            raise CheckpointError(
                f"processor_config.json: {name}={shown(processor[name])}, where config.json has "
                f"{value}"
            )
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if fields.get(name, True) is not True:
            raise UnsupportedModelError(f"{_FILE}: {name}={shown(fields[name])} is not supported")
    if unknown := changes.keys() - {"size"}:
        raise refused(
            "mm_processor_kwargs", sorted(map(str, unknown)), "only 'size' may be changed"
        )
    edge = _longest_edge(fields.get("size", {"longest_edge": 1024}))
    if edge is None:
        raise UnsupportedModelError(f"{_FILE}: size={shown(fields['size'])} is not supported")
    if "size" in changes:
        wanted = _longest_edge(changes["size"])
        if wanted is None or wanted > edge:
            raise refused(
                "mm_processor_kwargs.size",
                changes["size"],
                f'it must be {{"longest_edge": pixels}}, at most {edge}, as the model was trained',
            )
        edge = wanted
    names = {name: processor.get(name, usual) for name, usual in _TOKENS.items()}
    ids = _token_ids(tokenizer, names)
    if ids["image_token"] != image_token_id:
        raise CheckpointError(
            f"tokenizer.json: {names['image_token']!r} is the token {ids['image_token']}, where "
            f"config.json has {image_token_id}"
        )
    return ImageSpec(
        patch_size=patch_size,
        merge=merge,
        longest_edge=edge,
        resample=_filter(fields.get("resample", 3)),
        scale=_number(fields, "rescale_factor", 1 / 255),
        mean=_numbers(fields, "image_mean"),
        std=_numbers(fields, "image_std"),
        image_token=names["image_token"],
        image_token_id=image_token_id,
        break_token_id=ids["image_break_token"],
        end_token_id=ids["image_end_token"],
        max_images=max_images,
    )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _longest_edge(size: object) -> int | None:
    if not isinstance(size, Mapping) or set(size) != {"longest_edge"}:
        return None
    edge: Any = size["longest_edge"]
    is_number = isinstance(edge, int) and not isinstance(edge, bool)
    return edge if is_number and 0 < edge <= _HIGHEST_EDGE else None


def _token_ids(path: Path, names: Mapping[str, Any]) -> dict[str, int]:
    added = read_json(path, most=_MAX_TOKENIZER_BYTES).get("added_tokens") or []
    known = {one.get("content"): one.get("id") for one in added if isinstance(one, dict)}
    found = {}
    for name, token in names.items():
        number = known.get(token)
        if not isinstance(number, int) or number < 0:
            raise CheckpointError(f"tokenizer.json: there is no token {shown(token)} ({name})")
        found[name] = number
    return found


def _filter(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 5:
        raise UnsupportedModelError(f"{_FILE}: resample={shown(value)} is not one of Pillow's")
    return value


def _number(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise CheckpointError(f"{_FILE}: {name}={shown(value)} must be a number above zero")
    return float(value)


def _numbers(fields: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    values = fields.get(name)
    if not isinstance(values, list) or len(values) != 3:
        raise CheckpointError(f"{_FILE}: {name}={shown(values)} must be three numbers")
    red, green, blue = (_number({name: value}, name, 0.0) for value in values)
    return red, green, blue
