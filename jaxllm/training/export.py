"""Writes a checkpoint in Hugging Face's form, which transformers and this engine load."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxllm.training.forward import RowModel
from jaxllm.training.options import ShapeOptions
from jaxllm.training.tokenizer import END, EOS, load_tokenizer, save_tokenizer


def hf_config(shape: ShapeOptions, vocab_size: int) -> dict[str, Any]:
    """The config.json of a Llama of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": shape.max_model_len,
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "bfloat16",
    }


def export(
    folder: Path,
    model: RowModel,
    weights: Mapping[str, jax.Array],
    config: Mapping[str, Any],
    tokenizer_folder: Path,
) -> None:
    """Write a model directory: weights in bfloat16, config, generation config, tokenizer.

    It is written beside its place and then renamed: a reader finds the old one or the new one.
    """
    beside = folder.with_name(folder.name + ".new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    tokenizer = load_tokenizer(tokenizer_folder)
    save_tokenizer(tokenizer, beside)
    end_ids = [tokenizer.token_to_id(token) for token in (EOS, END)]
    write_json(beside / "config.json", {**config, "eos_token_id": end_ids})
    write_json(
        beside / "generation_config.json",
        {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "eos_token_id": end_ids},
    )
    tensors = {
        name: array.astype(ml_dtypes.bfloat16)
        for name, array in checkpoint_tensors(model, weights).items()
    }
    save_file(tensors, beside / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


def checkpoint_tensors(model: RowModel, weights: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Split fused weights and name them as in checkpoints."""
    tensors: dict[str, np.ndarray] = {}
    for name, source in model.sources.items():
        pieces = list(source.rows())
        ends = np.cumsum([piece.shape[0] for piece in pieces])[:-1]
        for piece, values in zip(pieces, np.split(np.asarray(weights[name]), ends), strict=True):
            assert values.shape == piece.tensor.shape, (name, source)
            tensors[piece.tensor.name] = np.ascontiguousarray(values)
    return tensors


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a config file of a model."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
