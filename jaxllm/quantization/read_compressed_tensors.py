"""Reads the `quantization_config` that compressed-tensors writes."""

from collections.abc import Mapping
from typing import Any

from jaxllm_kernels.coded import CodeForm

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.quantization.fields import (
    EVERY,
    FIELD,
    block,
    check_fields,
    check_one_of,
    names_of,
    pattern,
)
from jaxllm.quantization.form import Storage
from jaxllm.quantization.scheme import Scheme
from jaxllm.quantization.storages import Bytes, PackedFloat4, PackQuantized

# How the file was made, and what acts while it is made.
_HISTORY = {
    "quant_method", "quantization_status", "global_compression_ratio", "version",
    "transform_config", "sparsity_config", "kv_cache_scheme",
}  # fmt: skip
_WEIGHTS_HISTORY = {"observer", "observer_kwargs", "dynamic", "actorder", "scale_dtype", "zp_dtype"}
# Each code in a tensor of its type; codes in words; codes e2m1 in bytes.
_PLAIN = ("float-quantized", "int-quantized", "naive-quantized")
_PACKED = "pack-quantized"
_FLOAT4 = ("mxfp4-pack-quantized", "nvfp4-pack-quantized")
_MIXED = "mixed-precision"
_FORMATS = (*_PLAIN, _PACKED, *_FLOAT4)


def read_compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    check_fields(config, {*_HISTORY, "format", "config_groups", "ignore"})
    check_one_of(config, "format", (*_FORMATS, _MIXED))
    check_one_of(config, "quantization_status", (None, "compressed", "frozen"))
    for name in ("transform_config", "sparsity_config"):
        if config.get(name):
            raise UnsupportedModelError(
                f"{FIELD}.{name}={shown(config[name])} is not supported: it changes weights "
                "beyond codes and scales"
            )
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"config.json: {FIELD}.config_groups={shown(groups)} is no object")
    storages: list[tuple[str, Storage | None]] = []
    for name, group in groups.items():
        where = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise CheckpointError(f"config.json: {FIELD}.{where}={shown(group)} is no object")
        check_fields(
            group,
            {"targets", "weights", "input_activations", "output_activations", "format"},
            where,
        )
        kind = group.get("format")
        if kind is not None or config["format"] == _MIXED:
            check_one_of(group, "format", _FORMATS, where)
        storage = _storage(group.get("weights"), kind or config["format"], f"{where}.weights")
        targets = names_of(group, "targets", where)
        if not targets:
            raise CheckpointError(f"config.json: {FIELD}.{where}.targets names nothing")
        storages += [(pattern(target), storage) for target in targets]
    # Names before the class of all layers, as the more precise ones.
    storages.sort(key=lambda pair: pair[0] == EVERY)
    ignored = tuple(pattern(name) for name in names_of(config, "ignore"))
    return Scheme(method="compressed-tensors", storages=tuple(storages), ignored=ignored)


def _storage(weights: object, kind: str, where: str) -> Storage:
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"config.json: {FIELD}.{where}={shown(weights)} is no object")
    read = {"num_bits", "type", "strategy", "symmetric", "group_size", "block_structure"}
    check_fields(weights, {*_WEIGHTS_HISTORY, *read}, where)
    check_one_of(weights, "dynamic", (None, False), where)
    check_one_of(weights, "actorder", (None, False, "weight", "static"), where)
    if kind in _FLOAT4:
        return _float4(weights, kind, where)
    if kind == _PACKED:
        return _packed(weights, where)
    check_one_of(weights, "num_bits", (8,), where)
    check_one_of(weights, "type", ("int", "float"), where)
    check_one_of(weights, "symmetric", (True,), where)
    check_one_of(weights, "strategy", ("tensor", "channel", "group", "block"), where)
    codes = "int8" if weights["type"] == "int" else "float8_e4m3fn"
    strategy = weights["strategy"]
    if strategy == "block":
        outputs, inputs = block(weights.get("block_structure"), f"{where}.block_structure")
        return Bytes(form=CodeForm(codes=codes, group=inputs), outputs=outputs)
    group = _group(weights, strategy, where)
    return Bytes(
        form=CodeForm(codes=codes, group=group), outputs=None if strategy == "tensor" else 1
    )


def _packed(weights: Mapping[str, Any], where: str) -> PackQuantized:
    check_one_of(weights, "num_bits", (4, 8), where)
    check_one_of(weights, "type", ("int",), where)
    check_one_of(weights, "symmetric", (True, False), where)
    check_one_of(weights, "strategy", ("channel", "group"), where)
    form = CodeForm(
        codes=f"int{weights['num_bits']}",
        group=_group(weights, weights["strategy"], where),
        has_offsets=not weights["symmetric"],
    )
    return PackQuantized(form=form)


def _float4(weights: Mapping[str, Any], kind: str, where: str) -> PackedFloat4:
    is_mx = kind == _FLOAT4[0]
    check_one_of(weights, "num_bits", (4,), where)
    check_one_of(weights, "type", ("float",), where)
    check_one_of(weights, "symmetric", (None, True), where)
    check_one_of(weights, "strategy", ("group",) if is_mx else ("tensor_group",), where)
    check_one_of(weights, "group_size", (32,) if is_mx else (16,), where)
    if is_mx:
        powers = "float8_e8m0fnu"
        return PackedFloat4(form=CodeForm(codes="float4_e2m1fn", group=32, scale_dtype=powers))
    form = CodeForm(codes="float4_e2m1fn", group=16)
    return PackedFloat4(form=form, scalar_name="weight_global_scale")


def _group(weights: Mapping[str, Any], strategy: str, where: str) -> int | None:
    size = weights.get("group_size")
    if strategy != "group":
        check_one_of(weights, "group_size", (None, -1), where)
        return None
    if type(size) is not int or not 1 <= size <= 1 << 20:
        raise CheckpointError(f"config.json: {FIELD}.{where}.group_size={shown(size)} is no size")
    return size
