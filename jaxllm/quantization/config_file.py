"""Reads a config.json, and what releases of ModelOpt have in a file of its own beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError, shown
from jaxllm.files import read_json
from jaxllm.quantization.fields import FIELD

_BESIDE = "hf_quant_config.json"


def read_config(model_dir: Path) -> dict[str, Any]:
    """The config.json of a model. If it does not describe codes, and hf_quant_config.json does,
    with what that file says."""
    config = read_json(model_dir / "config.json")
    if config.get(FIELD) is not None or not (model_dir / _BESIDE).is_file():
        return config
    described = read_json(model_dir / _BESIDE)
    fields = described.get("quantization")
    if not isinstance(fields, Mapping):
        raise CheckpointError(f"{_BESIDE}: quantization={shown(fields)} must be an object")
    producer = described.get("producer")
    return config | {FIELD: {"quant_method": "modelopt", "producer": producer, **fields}}
