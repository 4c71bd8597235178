"""Small adapters of no model, for what reads adapters and what keeps them."""

import json

import numpy as np
from safetensors.numpy import save_file

from jaxllm.lora.request import AdapterLimits

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
LIMITS = AdapterLimits(
    max_loras=1, max_lora_rank=8, dtype="float32", layers={Q: (6, 4), DOWN: (5, 6)}
)


def write(path, config=(), tensors=(), dtype=np.float32):
    """An adapter of rank 2 and scale 3 on both layers. What is None is left out."""
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 6} | dict(config)
    (path / "adapter_config.json").write_text(
        json.dumps({name: value for name, value in fields.items() if value is not None})
    )
    random = np.random.default_rng(0)
    its = {}
    for layer, (inputs, outputs) in LIMITS.layers.items():
        its[f"base_model.model.{layer}.lora_A.weight"] = random.normal(size=(2, inputs))
        its[f"base_model.model.{layer}.lora_B.weight"] = random.normal(size=(outputs, 2))
    its |= dict(tensors)
    save_file(
        {name: value.astype(dtype) for name, value in its.items() if value is not None},
        path / "adapter_model.safetensors",
    )
    return path
