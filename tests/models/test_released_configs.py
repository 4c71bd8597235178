"""Config files with the fields of released models: all are known, and make models of their size.

The factors of Phi's LongRoPE are not those of the releases, and towers are cut short. Granite 4.0 H
Small has the fields of H Tiny with its own sizes.
"""

import dataclasses
import json
import math
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxllm.models.architecture import read_architecture
from jaxllm.models.decoder import DecoderForCausalLM
from jaxllm.weights.loader import parameters_of, sources_of

CONFIGS = json.loads(Path(__file__).with_name("released_configs.json").read_text())
# In thousand millions, without towers.
SIZES = {
    "Granite 3.1 8B": 8.17,
    "SmolLM3 3B": 3.08,
    "Seed-OSS 36B": 36.15,
    "Phi-3 mini 4k": 3.82,
    "Phi-4 mini": 3.84,
    "Phi-4": 14.66,
    "ERNIE 4.5 0.3B": 0.36,
    "GLM-4 9B": 9.40,
    "GLM-4 9B 0414": 9.40,
    "Hunyuan 7B": 7.50,
    "Mistral Small 3.1": 23.57,
    "Ministral 3 8B": 8.49,
    "StarCoder2 7B": 7.17,
    "EXAONE 4.0 32B": 32.00,
    "EXAONE 4.0 1.2B": 1.28,
    "Mixtral 8x7B": 46.70,
    "Qwen3 30B-A3B": 30.53,
    "Qwen1.5-MoE A2.7B": 14.32,
    "OLMoE 1B-7B": 6.92,
    "Granite 3.1 3B-A800M": 3.30,
    "gpt-oss 20B, in 16 bits": 20.91,
    "GLM-4.5 Air": 106.85,
    "ERNIE 4.5 21B-A3B": 21.83,
    "Hunyuan A13B": 80.39,
    "MiniMax M2, in 16 bits": 228.69,
    "Llama 4 Scout": 107.77,
    "Llama 4 Maverick": 400.71,
    "MiMo V2 Flash, in 16 bits": 308.78,
    "DeepSeek V2": 235.74,
    "DeepSeek V2 Lite": 15.71,
    "DeepSeek V3, in 16 bits": 671.03,
    "Kimi K2, in 16 bits": 1026.41,
    "GLM-4.7-Flash": 29.94,
    "Mistral Small 4, in 16 bits": 118.97,
    "Llama 3.1 8B": 8.03,
    "Llama 3.2 1B": 1.24,
    "SmolLM2 135M": 0.13,
    "Falcon 3 7B": 7.46,
    "Mistral 7B v0.1": 7.24,
    "Mistral Nemo": 12.25,
    "Qwen2.5 0.5B": 0.49,
    "Qwen3 4B": 4.02,
    "Qwen3-Coder 480B-A35B": 480.15,
    "Qwen2 57B-A14B": 57.41,
    "Gemma 2B": 2.51,
    "Gemma 2 9B": 9.24,
    "Gemma 3 1B": 1.00,
    "Gemma 3 27B": 27.01,
    "Gemma 4 31B": 30.70,
    "OLMo 7B": 6.89,
    "OLMo 2 7B": 7.30,
    "OLMo 3 7B": 7.30,
    "Command R": 34.98,
    "Command R+ of August 2024": 103.81,
    "Command R7B": 8.03,
    "Command A": 111.06,
    "Phi-2": 2.78,
    "Phi-3.5 mini": 3.82,
    "Pythia 1B": 1.01,
    "GPT-NeoX 20B": 20.55,
    "GPT-2 medium": 0.35,
    "StableLM 2 12B": 12.14,
    "StableLM 3B": 2.80,
    "Nemotron 4 340B": 341.03,
    "Moonlight 16B-A3B": 15.96,
    "DeepSeek V3.2, in 16 bits": 671.03,
    "GLM-5": 743.18,
    "GLM-4.6": 352.80,
    "Mixtral 8x22B": 140.63,
    "ERNIE 4.5 300B-A47B": 299.48,
    "LFM2 1.2B": 1.17,
    "LFM2 8B-A1B": 8.34,
    "Granite 4.0 H Small": 32.21,
    "Granite 4.0 H Tiny": 6.94,
    "Bamba 9B v2": 9.78,
    "Falcon-H1 0.5B": 0.52,
    "Mamba-Codestral 7B": 7.29,
    "Nemotron 3 Nano 30B-A3B": 31.58,
    "Nemotron Nano 9B v2": 8.89,
    "Qwen2.5-VL 7B": 7.62,
    "Qwen3-VL 4B": 4.02,
    "Qwen3-VL 30B-A3B": 30.53,
    "Qwen3.5 27B": 26.90,
    "Qwen3.6 35B-A3B": 34.66,
    "Kimi-Linear 48B-A3B": 49.12,
    "InternVL3 1B": 0.63,
    "InternVL3.5 38B": 32.76,
}
WITH_TOWERS = {
    "Qwen2.5-VL 7B": 8.29,
    "Qwen3-VL 4B": 4.44,
    "Qwen3-VL 30B-A3B": 31.07,
    "Qwen3.5 27B": 27.36,
    "Qwen3.6 35B-A3B": 35.11,
    "InternVL3 1B": 0.94,
    "InternVL3.5 38B": 38.39,
}


def num_parameters(architecture):
    def count(layers):
        model = DecoderForCausalLM.abstract(
            dataclasses.replace(architecture, layers=layers), jnp.bfloat16
        )
        return sum(math.prod(shape) for p in parameters_of(model).values() for shape in p.pieces)

    # One layer more for each of its kind.
    first, *_ = kinds = tuple(dict.fromkeys(architecture.layers))
    around = 2 * count((first,)) - count((first, first))
    return around + sum(
        (count((kind,)) - around) * architecture.layers.count(kind) for kind in kinds
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_is_known_and_the_model_has_its_size(name):
    # Two are read up to the length where their sparse attention is dense.
    longest = CONFIGS[name].get("index_topk")
    architecture = read_architecture(CONFIGS[name], max_model_len=longest)
    assert num_parameters(architecture) / 1e9 == pytest.approx(SIZES[name], abs=0.0051)


@pytest.mark.parametrize("name", WITH_TOWERS)
def test_towers_have_their_sizes(name):
    architecture = read_architecture(CONFIGS[name], sees_images=True)
    assert num_parameters(architecture) / 1e9 == pytest.approx(WITH_TOWERS[name], abs=0.0051)


def test_what_sets_the_layers_of_the_releases_apart():
    ropes = {
        name: [layer.rope is not None for layer in read_architecture(CONFIGS[name]).layers]
        for name in ("SmolLM3 3B", "EXAONE 4.0 32B", "EXAONE 4.0 1.2B")
    }
    assert ropes["SmolLM3 3B"] == [True, True, True, False] * 9
    assert ropes["EXAONE 4.0 32B"] == [True, True, True, False] * 16
    assert ropes["EXAONE 4.0 1.2B"] == [True] * 30
    hunyuan = read_architecture(CONFIGS["Hunyuan 7B"]).layers[0].rope
    assert hunyuan is not None
    assert hunyuan.theta == pytest.approx(11_158_840, abs=1) and hunyuan.scaling is None


def test_experts_of_a_released_qwen_that_sees_images_lie_in_two_tensors():
    architecture = read_architecture(CONFIGS["Qwen3-VL 30B-A3B"])
    model = DecoderForCausalLM.abstract(architecture, jnp.bfloat16)
    sources = sources_of(parameters_of(model), model.checkpoint_map)
    tensors = [
        (rows.tensor.name, rows.tensor.shape)
        for leaf in ("w13_weight", "w2_weight")
        for rows in sources[f"model.layers.0.mlp.experts.{leaf}"].rows()
    ]
    its = "model.language_model.layers.0.mlp.experts"
    assert tensors == [
        (f"{its}.gate_up_proj", (128, 2048, 1536)),
        (f"{its}.down_proj", (128, 768, 2048)),
    ]
