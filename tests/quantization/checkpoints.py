"""Writes tiny quantised checkpoints, and the same models with their weights as floats."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxllm.testing import make_tiny_checkpoint
from tests.quantization.formats import Format

INT8, FLOAT8 = np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST = {INT8: 127.0, FLOAT8: 448.0}
_NOT_LINEAR = ("embed_tokens", "embed_in", "lm_head", "norm", "router", "mlp.gate.", "moe.gate.")


def compressed(kind: str, strategy: str, **others: Any) -> dict[str, Any]:
    """The quantization_config of compressed-tensors."""
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True} | others
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def quantise(
    weight: np.ndarray, dtype: np.dtype, block: tuple[int | None, int | None]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The codes of a weight, the scales of its blocks, and what both say, in float32."""
    outputs, inputs = weight.shape
    rows, columns = block[0] or outputs, block[1] or inputs
    scales = np.empty((-(-outputs // rows), -(-inputs // columns)), np.float32)
    for i, j in np.ndindex(scales.shape):
        part = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scales[i, j] = np.abs(part).max() / _LARGEST[dtype]
    spread = np.repeat(np.repeat(scales, rows, 0)[:outputs], columns, 1)[:, :inputs]
    codes = weight / spread
    codes = (np.rint(codes) if dtype == INT8 else codes).astype(dtype)
    return codes, scales, codes.astype(np.float32) * spread


def write_both(
    path: Path,
    config: dict[str, Any],
    dtype: np.dtype,
    block: tuple[int | None, int | None],
    *,
    scale_name: str = "weight_scale",
    scale_shape: tuple[int, ...] | None = None,
    ignored: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    family: str = "llama",
    **fields: Any,
) -> tuple[Path, Path]:
    """Write a quantised model, and the model that it stands for. `config` is what config.json says
    of the codes; layers whose names contain one of `ignored` have none."""
    coded = make_tiny_checkpoint(path / "coded", family, **fields)
    plain = make_tiny_checkpoint(path / "plain", family, **fields)
    tensors = load_file(plain / "model.safetensors")
    stored, floats = dict(extra or {}), {}
    for name, weight in tensors.items():
        module, _, leaf = name.rpartition(".")
        is_linear = leaf == "weight" and weight.ndim == 2
        if not is_linear or any(part in name for part in (*_NOT_LINEAR, *ignored)):
            stored[name] = floats[name] = weight
            continue
        stored[name], scales, floats[name] = quantise(weight, dtype, block)
        stored[f"{module}.{scale_name}"] = (
            scales if scale_shape is None else scales.reshape(scale_shape)
        )
    save_file(stored, coded / "model.safetensors")
    save_file(floats, plain / "model.safetensors")
    described = json.loads((coded / "config.json").read_text()) | {"quantization_config": config}
    (coded / "config.json").write_text(json.dumps(described))
    return coded, plain


def write_format(
    path: Path, form: Format, family: str = "llama", *, also: tuple[str, ...] = (), **fields: Any
) -> tuple[Path, Path]:
    """Write a model of random codes in a format, and the model that they stand for. `also` names
    modules with codes that have none otherwise."""
    coded = make_tiny_checkpoint(path / "coded", family, **fields)
    plain = make_tiny_checkpoint(path / "plain", family, **fields)
    stored, floats = {}, {}
    random = np.random.default_rng(7)
    for name, weight in load_file(plain / "model.safetensors").items():
        module, _, leaf = name.rpartition(".")
        left_out = [part for part in _NOT_LINEAR if part not in also]
        if leaf != "weight" or weight.ndim != 2 or any(part in name for part in left_out):
            stored[name] = floats[name] = weight
            continue
        tensors, values = form.write(random, *weight.shape)
        # As large as the model's own.
        factor = float(weight.std() / values.std())
        floats[name] = (values * _scaled(tensors, factor)).astype(np.float32)
        stored |= {f"{module}.{key}": np.atleast_1d(array) for key, array in tensors.items()}
    save_file(stored, coded / "model.safetensors")
    save_file(floats, plain / "model.safetensors")
    described = json.loads((coded / "config.json").read_text())
    described["quantization_config"] = dict(form.config)
    (coded / "config.json").write_text(json.dumps(described))
    return coded, plain


def _scaled(tensors: dict[str, np.ndarray], factor: float) -> float:
    """Make the weights of a module larger, by about a factor; return by how much."""
    power = 2.0 ** round(np.log2(factor))
    for leaf in ("weight_global_scale", "weight_scale_2", "SCB", "scales", "weight_scale_inv"):
        if leaf in tensors:
            by = 1 / power if leaf == "weight_global_scale" else power
            tensors[leaf] = (tensors[leaf] * by).astype(tensors[leaf].dtype)
            return power
    scales = tensors["weight_scale"]
    if scales.dtype == np.uint8:
        tensors["weight_scale"] = scales + np.int8(np.log2(power)).astype(np.uint8)
        return power
    tensors["weight_scale"] = (scales * scales.dtype.type(power)).astype(scales.dtype)
    return power
