"""Reads an adapter's matrices, and checks every one of them against the layers of the model."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxllm.errors import CheckpointError, ValidationError
from jaxllm.lora.adapter_config import CONFIG, AdapterConfig, wrong
from jaxllm.lora.request import AdapterLimits
from jaxllm.weights.checkpoint import Checkpoint

WEIGHTS = "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
# What a part of a tensor's name means, and why it is refused.
_REFUSED = {
    "lora_magnitude_vector": "the norms of DoRA are not supported",
    "lora_embedding_": "adapters of embeddings are not supported; merge the adapter",
    ".base_layer.": "it holds weights of the base; save it without embedding layers",
    ".modules_to_save.": "whole modules are not supported; merge the adapter",
    "trainable_tokens_delta": "new embeddings of tokens are not supported; merge the adapter",
    ".lora_A.bias": "adapters with biases are not supported",
    ".lora_B.bias": "adapters with biases are not supported",
    ".experts.": "adapters of experts are not supported",
}
_CHUNK = 1 << 22


class Matrices(NamedTuple):
    """What an adapter adds to a layer: B A, with its scale in B."""

    a: np.ndarray  # [r, in]
    b: np.ndarray  # [out, r]


def content_of(directory: Path) -> str:
    """The hash of an adapter's files."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        path = directory / name
        try:
            with path.open("rb") as file:
                digest.update(path.stat().st_size.to_bytes(8, "little"))
                while piece := file.read(_CHUNK):
                    digest.update(piece)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def read_adapter(directory: Path, limits: AdapterLimits) -> dict[str, Matrices]:
    """Read an adapter, by layer; raise CheckpointError or ValidationError unless the model can use
    every tensor."""
    config = AdapterConfig.read(directory)
    path = directory / WEIGHTS
    if not path.exists() and (directory / "adapter_model.bin").exists():
        raise CheckpointError(
            f"{directory} has its matrices in adapter_model.bin, a pickle, which can run any code "
            "when loaded; save it with PEFT's safe_serialization=True"
        )
    with Checkpoint(directory, files=(path,)) as checkpoint:
        sides = _by_layer(path, checkpoint.tensors.keys())
        if not sides:
            raise CheckpointError(f"{path} has no tensors")
        adapter: dict[str, Matrices] = {}
        for layer, names in sides.items():
            missing = {"A", "B"} - names.keys()
            if missing:
                raise CheckpointError(f"{path}: {layer} has no lora_{missing.pop()}")
            a, b = (checkpoint.read(names[side]) for side in "AB")
            _check_shapes(path, layer, a, b, config, limits)
            adapter[layer] = _scaled(path, layer, a, b, config.scale_of(layer), limits.dtype)
    return adapter


def _by_layer(path: Path, tensors: Iterable[str]) -> dict[str, dict[str, str]]:
    """The names of the tensors of each layer, by side."""
    sides: dict[str, dict[str, str]] = {}
    for name in sorted(tensors):
        for part, why in _REFUSED.items():
            if part in name:
                raise ValidationError(f"{path}: tensor {name}: {why}", parameter="lora_request")
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise ValidationError(
                f"{path}: tensor {name} is none of LoRA's: base_model.model.<layer>.lora_A.weight "
                "and lora_B.weight",
                parameter="lora_request",
            )
        sides.setdefault(found["layer"], {})[found["side"]] = name
    return sides


def _check_shapes(
    path: Path,
    layer: str,
    a: np.ndarray,
    b: np.ndarray,
    config: AdapterConfig,
    limits: AdapterLimits,
) -> None:
    def refuse(why: str) -> ValidationError:
        return ValidationError(f"{path}: {layer}: {why}", parameter="lora_request")

    if layer not in limits.layers:
        last = layer.rpartition(".")[2]
        if last in ("embed_tokens", "lm_head"):
            raise refuse("adapters of embeddings and heads are not supported; merge the adapter")
        like = sorted({name.rpartition(".")[2] for name in limits.layers})
        raise refuse(
            "the model has no such linear layer that an adapter can change; it has layers "
            f"named {', '.join(like)}"
        )
    if not {a.dtype.name, b.dtype.name} <= {"float32", "float16", "bfloat16"}:
        raise refuse(f"its matrices are stored as {a.dtype} and {b.dtype}, not as floats")
    num_inputs, num_outputs = limits.layers[layer]
    rank = config.rank_of(layer)
    if rank > limits.max_lora_rank:
        raise wrong(
            config.path,
            "r",
            rank,
            f"the rank of {layer} is above max_lora_rank={limits.max_lora_rank}; start the engine "
            "with a higher one",
        )
    if a.shape != (rank, num_inputs) or b.shape != (num_outputs, rank):
        raise refuse(
            f"lora_A is {list(a.shape)} and lora_B {list(b.shape)}; with rank {rank}, which "
            f"{CONFIG} says, and the model's layer they must be {[rank, num_inputs]} and "
            f"{[num_outputs, rank]}"
        )


def _scaled(
    path: Path, layer: str, a: np.ndarray, b: np.ndarray, scale: float, dtype: str
) -> Matrices:
    """The matrices in the engine's type, with the scale in B, which float32 takes first."""
    kept = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with np.errstate(over="ignore"):  # refused below
        matrices = Matrices(a.astype(kept), (b.astype(np.float32) * np.float32(scale)).astype(kept))
    for side, matrix in zip("AB", matrices, strict=True):
        if not np.isfinite(matrix.astype(np.float32)).all():
            raise ValidationError(
                f"{path}: {layer}: lora_{side} has values that {dtype} does not have, or NaN",
                parameter="lora_request",
            )
    return matrices
