"""Tiny models to pool with: transformers writes their checkpoints, and says what is right."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxllm.testing import VOCAB_SIZE, make_tiny_checkpoint, tiny_config

TEXTS = [
    "The engine keeps a queue of requests.",
    "once",
    "Each request is a prompt and the tokens that were made of it, one after another, in order.",
    "A",
    "the scheduler chooses which requests run, and in which blocks their keys are written",
]
BERT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def write_model(path: Path, kind: str, family: str = "qwen3", **fields: Any) -> Path:
    """Write a checkpoint of a class of transformers, with the tokenizer of tiny models."""
    import torch
    import transformers

    if family == "bert":
        made, tiny = make_tiny_checkpoint(path / "made"), BERT
    else:
        made, tiny = make_tiny_checkpoint(path / "made", family), tiny_config(family)
    config_of = {
        "qwen2": "Qwen2Config",
        "qwen3": "Qwen3Config",
        "llama": "LlamaConfig",
        "phi": "PhiConfig",
        "gemma2": "Gemma2Config",
        "bert": "BertConfig",
    }[family]
    config = getattr(transformers, config_of)(**(tiny | {"pad_token_id": 0} | fields))
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).float()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(made / name, path / name)
    shutil.rmtree(made)
    return path


def describe(path: Path, pooling: str, *, normalizes: bool = True, **told: Any) -> Path:
    """Add the files of sentence-transformers to a checkpoint."""
    of = "sentence_transformers.models."
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    if normalizes:
        modules.append(("2_Normalize", "Normalize"))
    listed = [
        {"idx": i, "name": str(i), "path": where, "type": of + kind}
        for i, (where, kind) in enumerate(modules)
    ]
    (path / "1_Pooling").mkdir()
    for name, value in (
        ("modules.json", listed),
        ("1_Pooling/config.json", {"word_embedding_dimension": 64, pooling: True}),
        ("config_sentence_transformers.json", told),
    ):
        (path / name).write_text(json.dumps(value))
    return path


def write_adapter(
    path: Path, model: Path, last_names: tuple[str, ...], *, prefix: str = "", seed: int = 1
) -> Path:
    """Write random matrices for layers of a checkpoint, named as PEFT names them."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if weight.ndim == 2 and layer.endswith(last_names):
            a = rng.standard_normal((4, weight.shape[1])) / weight.shape[1] ** 0.5
            b = rng.standard_normal((weight.shape[0], 4)) / 8
            full = f"base_model.model.{prefix}{layer}.lora_"
            tensors |= {f"{full}A.weight": a, f"{full}B.weight": b}
    path.mkdir()
    fields = {"peft_type": "LORA", "task_type": "FEATURE_EXTRACTION", "r": 4, "lora_alpha": 8}
    (path / "adapter_config.json").write_text(json.dumps(fields))
    its = {name: value.astype(np.float32) for name, value in tensors.items()}
    save_file(its, path / "adapter_model.safetensors")
    return path


def hidden_states(path: Path, prompts: list[list[int]]) -> list[np.ndarray]:
    """Of each prompt alone, f32 [tokens, D], behind the last norm."""
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(path).float().eval()
    with torch.no_grad():
        return [model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in prompts]


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
