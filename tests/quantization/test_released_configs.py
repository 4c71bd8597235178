"""Config files of released models whose weights are codes: all of them are known, and the models
that they make have codes where the releases have them, and take the memory that they say."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxllm.layers.linear import Linear
from jaxllm.models.architecture import read_architecture
from jaxllm.models.decoder import DecoderForCausalLM
from jaxllm.quantization.linear import CodedExperts, CodedLinear
from jaxllm.weights.loader import parameters_of

RELEASED = Path(__file__).parents[1] / "models" / "released_configs.json"
CONFIGS = json.loads(RELEASED.read_text())
BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
# Kimi K2 Thinking: experts in 4 bits.
IN_WORDS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}
# Name -> the config in 16 bits, what the release has besides, and thousand millions of bytes.
# With a scale per 128 inputs of each output, blocks take 3 % more than in the release.
CODED = {
    "gpt-oss 20B": ("gpt-oss 20B, in 16 bits", {"quantization_config": MXFP4}, 13.76),
    "gpt-oss 120B": (
        "gpt-oss 20B, in 16 bits",
        {"quantization_config": MXFP4, "num_hidden_layers": 36,
            "layer_types": ["sliding_attention", "full_attention"] * 18, "num_local_experts": 128},
        65.25,
    ),
    "DeepSeek V3": (
        "DeepSeek V3, in 16 bits",
        {"quantization_config": BLOCKS},
        1.03 * 671.03 + 1.85 + 1.0,
    ),
    "Kimi K2": ("Kimi K2, in 16 bits", {"quantization_config": BLOCKS}, 1.03 * 1026.4 + 2.35 + 0.5),
    "Kimi K2 Thinking": (
        "Kimi K2, in 16 bits",
        {"quantization_config": IN_WORDS},
        # Scales have 32 bits.
        (0.5 + 4 / 32) * 1014.7 + 2 * 11.7,
    ),
    "MiniMax M2": (
        "MiniMax M2, in 16 bits",
        {
            "quantization_config": BLOCKS
            | {
                "fmt": "float8_e4m3fn",
                "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
            }
        },
        1.03 * 228.69 + 1.23,
    ),
    "Ministral 3 8B": (
        "Ministral 3 8B",
        {
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "static",
                "dequantize": False,
                "weight_block_size": None,
                "modules_to_not_convert": [
                    "model.vision_tower", "model.multi_modal_projector", "lm_head",
                ],
            }
        },
        8.49 + 1.07,
    ),
}  # fmt: skip


def num_bytes(architecture):
    def count(layers):
        model = DecoderForCausalLM.abstract(
            dataclasses.replace(architecture, layers=layers), jnp.bfloat16
        )
        return sum(p.size * p.dtype.itemsize for p in parameters_of(model).values())

    first, *_ = kinds = tuple(dict.fromkeys(architecture.layers))
    around = 2 * count((first,)) - count((first, first))
    return around + sum(
        (count((kind,)) - around) * architecture.layers.count(kind) for kind in kinds
    )


@pytest.mark.parametrize("name", CODED)
def test_models_as_released(name):
    config, fields, size = CODED[name]
    architecture = read_architecture(CONFIGS[config] | fields)
    assert num_bytes(architecture) / 1e9 == pytest.approx(size, rel=0.01)
    last = dataclasses.replace(architecture, layers=architecture.layers[-1:])
    model = DecoderForCausalLM.abstract(last, jnp.bfloat16, num_shards=8)
    modules = [module for _, module in nnx.iter_graph(model.model.layers[0])]
    kinds = {type(module) for module in modules}
    assert CodedExperts in kinds or name.startswith("Ministral")
    only_experts = name.startswith("gpt-oss") or name == "Kimi K2 Thinking"
    assert (CodedLinear in kinds) != only_experts
    assert (Linear in kinds) == only_experts
