"""Reads `quantization_config` of a config.json, and what the user asks for, into a scheme.

Every field is read, or named here with the reason why it changes nothing. Rows are not quantised:
they keep 16 bits where a checkpoint was made for products of 8 bits. So answers are those of the
stored weights, and closer to the model's before it was quantised.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.errors import CheckpointError, UnsupportedModelError, refused, shown
from jaxllm.quantization.form import Block, CodeType, Form
from jaxllm.quantization.scheme import Scheme

_FIELD = "quantization_config"
_EVERY = ""  # matches all names
# Linear layers that stay as they are if the user asks for codes, as vLLM has it.
_NEVER = (r".*\.shared_expert_gate$",)
_AT_LOAD: dict[str, CodeType] = {"int8": "int8", "fp8": "float8_e4m3fn"}


def read_scheme(config: Mapping[str, Any] | None, asked: str | None) -> Scheme | None:
    """The scheme of a checkpoint, or the one that the user asks for. None: no layer has codes."""
    if not config:
        return None if asked is None else _at_load(asked)
    if not isinstance(config, Mapping):
        raise CheckpointError(f"config.json: {_FIELD}={shown(config)} must be an object")
    method = config.get("quant_method", "of unknown kind")
    if not isinstance(method, str) or method not in _METHODS:
        raise UnsupportedModelError(
            f"{_FIELD} {method!s:.80} is not supported; supported are {', '.join(_METHODS)} and "
            "unquantised checkpoints"
        )
    if asked is not None and asked != method:
        raise refused("quantization", asked, f"the checkpoint is quantised with {method}")
    return _METHODS[method](config)


def _at_load(asked: str) -> Scheme:
    if asked not in _AT_LOAD:
        raise refused(
            "quantization",
            asked,
            f"a checkpoint that is not quantised can be read as {' or '.join(_AT_LOAD)}; others "
            f"name the method of a quantised one: {', '.join(_METHODS)}",
        )
    form = Form(codes=_AT_LOAD[asked], block=Block(1, None))
    return Scheme(method=asked, forms=((_EVERY, form),), ignored=_NEVER)


# What changes nothing of what is computed here.
_FP8_HARMLESS = {"quant_method", "fmt", "scale_fmt", "activation_scheme", "ignored_layers"}


def _read_fp8(config: Mapping[str, Any]) -> Scheme:
    """A scale for each tensor, or for each block of 128 by 128."""
    _check_fields(
        config, {*_FP8_HARMLESS, "weight_block_size", "modules_to_not_convert", "kv_cache_scheme"}
    )
    _check_one_of(config, "fmt", (None, "e4m3", "float8_e4m3fn"))
    _check_one_of(config, "activation_scheme", (None, "dynamic", "static"))
    _check_one_of(config, "scale_fmt", (None, "ue8m0", "float"))
    size = config.get("weight_block_size")
    if size is None:
        form = Form(codes="float8_e4m3fn", block=Block(None, None), scale_name="weight_scale")
    else:
        form = Form(
            codes="float8_e4m3fn",
            block=_block(size, "weight_block_size"),
            scale_name="weight_scale_inv",
        )
    names = [*_names(config, "modules_to_not_convert"), *_names(config, "ignored_layers")]
    # A name is that of a module, or of one that contains it.
    ignored = tuple(rf"{re.escape(name)}(\.|$)" for name in names)
    return Scheme(method="fp8", forms=((_EVERY, form),), ignored=ignored)


# How the file was made, and what acts while it is made.
_HISTORY = {
    "quant_method", "quantization_status", "global_compression_ratio", "version",
    "transform_config", "sparsity_config", "kv_cache_scheme",
}  # fmt: skip
_WEIGHTS_HISTORY = {"observer", "observer_kwargs", "dynamic", "actorder", "scale_dtype", "zp_dtype"}
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")


def _read_compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    _check_fields(config, {*_HISTORY, "format", "config_groups", "ignore"})
    _check_one_of(config, "format", _FORMATS)
    _check_one_of(config, "quantization_status", (None, "compressed", "frozen"))
    for name in ("transform_config", "sparsity_config"):
        if config.get(name):
            raise UnsupportedModelError(
                f"{_FIELD}.{name}={shown(config[name])} is not supported: it changes weights "
                "beyond codes and scales"
            )
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"config.json: {_FIELD}.config_groups={shown(groups)} is no object")
    forms = []
    for name, group in groups.items():
        where = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise CheckpointError(f"config.json: {_FIELD}.{where}={shown(group)} is no object")
        _check_fields(
            group,
            {"targets", "weights", "input_activations", "output_activations", "format"},
            where,
        )
        if group.get("format") is not None:
            _check_one_of(group, "format", _FORMATS, where)
        form = _read_weights(group.get("weights"), f"{where}.weights")
        targets = _names(group, "targets", where)
        if not targets:
            raise CheckpointError(f"config.json: {_FIELD}.{where}.targets names nothing")
        forms += [(_pattern(target), form) for target in targets]
    # Names before the class of all layers, as the more precise ones.
    forms.sort(key=lambda pair: pair[0] == _EVERY)
    ignored = tuple(_pattern(name) for name in _names(config, "ignore"))
    return Scheme(method="compressed-tensors", forms=tuple(forms), ignored=ignored)


def _read_weights(weights: object, where: str) -> Form:
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"config.json: {_FIELD}.{where}={shown(weights)} is no object")
    read = {"num_bits", "type", "strategy", "symmetric", "group_size", "block_structure"}
    _check_fields(weights, {*_WEIGHTS_HISTORY, *read}, where)
    _check_one_of(weights, "num_bits", (8,), where)
    _check_one_of(weights, "type", ("int", "float"), where)
    _check_one_of(weights, "symmetric", (True,), where)
    _check_one_of(weights, "dynamic", (None, False), where)
    _check_one_of(weights, "actorder", (None, False, "weight", "static"), where)
    _check_one_of(weights, "strategy", ("tensor", "channel", "block"), where)
    strategy = weights["strategy"]
    if strategy == "block":
        block = _block(weights.get("block_structure"), f"{where}.block_structure")
    else:
        _check_one_of(weights, "group_size", (None, -1), where)
        block = Block(1 if strategy == "channel" else None, None)
    codes = "int8" if weights["type"] == "int" else "float8_e4m3fn"
    return Form(codes=codes, block=block, scale_name="weight_scale")


_METHODS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
}


def _block(value: object, name: str) -> Block:
    if isinstance(value, str):
        value = [int(part) if part.isdecimal() else 0 for part in value.split("x")]
    sizes = list(value) if isinstance(value, (list, tuple)) else []
    if len(sizes) != 2 or not all(type(size) is int and 1 <= size <= 1 << 20 for size in sizes):
        raise CheckpointError(
            f"config.json: {_FIELD}.{name}={shown(value)} must be two sizes, of outputs and inputs"
        )
    return Block(*sizes)


def _names(config: Mapping[str, Any], field: str, where: str = "") -> list[str]:
    names = config.get(field)
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        place = ".".join(filter(None, (_FIELD, where, field)))
        raise CheckpointError(f"config.json: {place}={shown(names)} must be a list of names")
    return names


def _pattern(name: str) -> str:
    """The pattern of a target: a class, a name, or a regular expression after "re:"."""
    if name == "Linear":
        return _EVERY
    if not name.startswith("re:"):
        return f"{re.escape(name)}$"
    pattern = name.removeprefix("re:")
    try:
        re.compile(pattern)
    except re.error as error:
        raise CheckpointError(
            f"config.json: {_FIELD} has the pattern {shown(pattern)}: {error}"
        ) from error
    return pattern


def _check_fields(config: Mapping[str, Any], known: set[str], where: str = "") -> None:
    unknown = sorted(set(config) - known)
    if unknown:
        place = ".".join(filter(None, (_FIELD, where, unknown[0])))
        raise UnsupportedModelError(f"{place:.200} is not supported: nothing here knows the field")


def _check_one_of(
    config: Mapping[str, Any], field: str, supported: tuple[object, ...], where: str = ""
) -> None:
    value = config.get(field)
    if not any(type(value) is type(one) and value == one for one in supported):
        place = ".".join(filter(None, (_FIELD, where, field)))
        names = [shown(one) for one in supported if one is not None]
        raise UnsupportedModelError(
            f"{place:.200}={shown(value)} is not supported; supported are {', '.join(names)}"
        )
