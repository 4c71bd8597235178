"""Writes tiny models as GGUF files, with the gguf package, and checkpoints of the same models with
the weights that the files say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxllm.gguf.blocks import NAMES, TYPES
from jaxllm.gguf.names import NAMINGS
from jaxllm.testing import make_tiny_checkpoint
from tests.gguf.test_blocks import random_blocks

NUMBERS = {name: kind for kind, name in NAMES.items()}
F32 = NUMBERS["F32"]
# The family of a tiny model, and fields in which it differs, by the architecture of its file.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3_moe", {"mlp_only_layers": []}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 24}),
    "gemma3": (
        "gemma3",
        {"sliding_window_pattern": 6, "num_hidden_layers": 7, "query_pre_attn_scalar": 24},
    ),
    "phi3": ("phi3", {}),
}


def write_pair(
    path: Path,
    architecture: str = "llama",
    type_of: Callable[[str], str] = lambda name: "F32",
    *,
    parts: int = 1,
    metadata: dict[str, Any] | None = None,
    **fields: Any,
) -> tuple[Path, Path]:
    """Write a file (or several), and a checkpoint with the same values. `type_of` is asked with the
    names of tensors in the file."""
    family, more = FAMILIES[architecture]
    plain = make_tiny_checkpoint(path / "plain", family, **(more | fields))
    config = json.loads((plain / "config.json").read_text())
    tensors = load_file(plain / "model.safetensors")
    naming, heads = NAMINGS[architecture], config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    stored, floats = {}, {}
    for name, known in _names(tensors, naming).items():
        values = np.stack([tensors[one] for one in known]).astype(np.float32)
        values = values if len(known) > 1 else values[0]
        is_rotated = naming.has_pairs and ("attn_q." in name or "attn_k." in name)
        if naming.adds_one and name.endswith("norm.weight"):
            values = values + 1
        if is_rotated:
            values = in_pairs(values, head_size)
        kind = NUMBERS[type_of(name)] if values.ndim > 1 else F32
        data, values = as_blocks(values, kind, seed=len(stored))
        stored[name] = (data, values.shape, kind)
        if is_rotated:
            values = in_halves(values, head_size)
        if naming.adds_one and name.endswith("norm.weight"):
            values = values - 1
        floats |= zip(known, values if len(known) > 1 else [values], strict=True)
    if (scaling := config.get("rope_scaling")) is not None:
        factors = llama3_factors(scaling, config["rope_theta"], head_size)
        stored["rope_freqs.weight"] = (factors, factors.shape, F32)
    save_file(
        {name: np.ascontiguousarray(its) for name, its in floats.items()},
        plain / "model.safetensors",
    )
    kinds = architecture if architecture != "mixtral" else "llama"
    values = describe(config, kinds, head_size) | tokenizer(plain) | (metadata or {})
    return write_files(path, kinds, values, stored, parts), plain


def _names(tensors: dict[str, Any], naming: Any) -> dict[str, list[str]]:
    """The tensors of a file, and those of the checkpoint of which each is made."""
    found: dict[str, list[str]] = {}
    layers = range(1 + max(int(n.split(".")[2]) for n in tensors if n.startswith("model.layers.")))
    known = {f"{own}": name for name, own in naming.whole.items()}
    for layer in layers:
        for name, own in naming.of_layer.items():
            known[f"model.layers.{layer}.{own}"] = f"blk.{layer}.{name}"
    for tensor in tensors:
        module, _, leaf = tensor.rpartition(".")
        if module in known:
            found[f"{known[module]}.{leaf}"] = [tensor]
    for layer in layers:
        for name, own in naming.of_expert.items():
            experts = []
            while (one := f"model.layers.{layer}.{own.format(len(experts))}.weight") in tensors:
                experts.append(one)
            found[f"blk.{layer}.{name}.weight"] = experts
    assert sorted(one for its in found.values() for one in its) == sorted(tensors)
    return found


def in_pairs(rows: np.ndarray, head_size: int) -> np.ndarray:
    """Rows of heads whose rotated pairs are in halves, with the members of each side by side."""
    shape = rows.shape
    return rows.reshape(-1, 2, head_size // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def in_halves(rows: np.ndarray, head_size: int) -> np.ndarray:
    shape = rows.shape
    return rows.reshape(-1, head_size // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def llama3_factors(scaling: dict[str, Any], theta: float, head_size: int) -> np.ndarray:
    """What the frequencies of a rotation are divided by."""
    frequencies = theta ** -(np.arange(0, head_size, 2) / head_size)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / scaling["factor"] + share)).astype(np.float32)


def as_blocks(values: np.ndarray, kind: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The data of a tensor, made up if the package cannot write it, and the values that it says."""
    its = TYPES[kind]
    if its.codes is None:
        data = values.astype(its.dtype)
        return data, data.astype(np.float32)
    qtype = gguf.GGMLQuantizationType(kind)
    try:
        data = gguf.quants.quantize(values, qtype)
    except NotImplementedError:
        count = values.size // its.size
        rough = gguf.quants.dequantize(random_blocks(kind, count, seed), qtype)
        size = 0.1 * values.std() / rough.std()
        data = random_blocks(kind, count, seed, size).reshape(*values.shape[:-1], -1)
    return data, gguf.quants.dequantize(data, qtype).reshape(values.shape)


def describe(config: dict[str, Any], kind: str, head_size: int) -> dict[str, Any]:
    """The metadata of a model."""
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    sizes = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "rope.dimension_count": head_size,
        "rope.freq_base": float(full.get("rope_theta") or config.get("rope_theta")),
        "vocab_size": config["vocab_size"],
        "expert_count": config.get("num_local_experts") or config.get("num_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }
    if kind in ("gemma2", "gemma3", "phi3"):
        sizes["attention.sliding_window"] = config.get("sliding_window")
    if full.get("rope_type", "default") == "linear":
        sizes |= {"rope.scaling.type": "linear", "rope.scaling.factor": full["factor"]}
    return {f"{kind}.{name}": value for name, value in sizes.items() if value is not None}


def tokenizer(model: Path) -> dict[str, Any]:
    """The metadata of a tokenizer of bytes."""
    described = json.loads((model / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {its["content"] for its in described["added_tokens"]}
    config = json.loads((model / "tokenizer_config.json").read_text())
    merges = described["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": config["chat_template"],
    }


def write_files(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[np.ndarray, tuple[int, ...], int]],
    parts: int = 1,
) -> Path:
    """Write the files of a model; return the first."""
    names = list(tensors)
    first = None
    for part in range(parts):
        suffix = f"-{part + 1:05}-of-{parts:05}" if parts > 1 else ""
        file = path / f"model{suffix}.gguf"
        first = first or file
        writer = gguf.GGUFWriter(file, architecture)
        if parts > 1:
            writer.add_uint16("split.no", part)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(names))
        for key, value in metadata.items() if part == 0 else ():
            _add(writer, key, value)
        for name in names[part::parts]:
            data, shape, kind = tensors[name]
            qtype = gguf.GGMLQuantizationType(kind)
            if TYPES[kind].codes is None:
                if NAMES[kind] == "BF16":
                    data = data.view(np.uint8)
                writer.add_tensor(name, data, raw_dtype=qtype)
            else:
                writer.add_tensor(name, data.reshape(*shape[:-1], -1), raw_dtype=qtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert first is not None
    return first


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
