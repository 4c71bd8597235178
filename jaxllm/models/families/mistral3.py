"""Ministral 3, and Mistral 3 and Pixtral 12B, which also see images.

Ministral 3 is Mistral without windows, with YaRN, and with queries that grow with their position.
The decoder inside a Mistral 3 is one of these, a plain Mistral (Small 3.1 and 3.2, Magistral), or a
Mistral Small 4; that of Pixtral 12B is a plain Mistral.
"""

import dataclasses
from typing import Any

from jaxllm.errors import UnsupportedModelError, shown
from jaxllm.layers.latent_attention import LatentAttentionSpec
from jaxllm.models.around_decoder import inside_larger_model
from jaxllm.models.checkpoint_map import LLAMA_NAMES, CheckpointMap
from jaxllm.models.families import mistral, mistral4
from jaxllm.models.family import (
    Family,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_mlp,
    read_temperature,
    read_window,
)
from jaxllm.models.harmless import AROUND_DECODER
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture
from jaxllm.models.towers import pixtral

_IN_LARGER_MODEL = "Mistral3ForConditionalGeneration"
# A decoder behind any tower; those of Pixtral are read here.
_PIXTRAL = "LlavaForConditionalGeneration"
# Of the class in transformers. The config of a decoder inside a larger model leaves them out.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def read(name: str, config: HFConfig) -> Architecture:
    if name not in (_IN_LARGER_MODEL, _PIXTRAL):
        return _read_ministral(name, config)
    text = config.inside("text_config")
    match text.get("model_type", "mistral"):
        case "mistral":
            return mistral.read(name, text)
        case "ministral3":
            return _read_ministral(name, text)
        case "mistral4":
            return mistral4.read(name, text)
        case other:
            raise UnsupportedModelError(
                f"config.json: model_type={shown(other)} in text_config is not supported; "
                "supported are 'mistral', 'ministral3' and 'mistral4'"
            )


def _read_ministral(name: str, config: HFConfig) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    window = read_window(config)
    mistral.refuse_mixed_layers(config, window)
    attention = dataclasses.replace(
        read_attention(
            config, other_parameters=("llama_4_scaling_beta", "max_position_embeddings")
        ),
        window=window,
        temperature=read_temperature(config),
    )
    layer = pre_norm_layer(config, attention, read_mlp(config))
    return read_decoder(name, config, [layer] * config.integer("num_hidden_layers"))


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    if architecture.name not in (_IN_LARGER_MODEL, _PIXTRAL):
        return LLAMA_NAMES
    (mixer,) = architecture.layers[0].mixers
    keeps_latents = isinstance(mixer, LatentAttentionSpec)
    names = inside_larger_model(mistral4.checkpoint(architecture) if keeps_latents else LLAMA_NAMES)
    return names if architecture.tower is None else architecture.tower.names(names)


FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
    tiny={
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "head_dim": 24,
        "max_position_embeddings": 64,
        "rope_theta": None,
        "rope_parameters": {
            "type": "yarn",
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "llama_4_scaling_beta": 0.3,
        },
    },
    tower=pixtral.read,
    tiny_config_around={
        "architectures": [_IN_LARGER_MODEL],
        "model_type": "mistral3",
        "image_token_index": 3,
        "spatial_merge_size": 2,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "multimodal_projector_bias": False,
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 4,
            "image_size": 64,
            "hidden_act": "gelu",
            "rope_theta": 100.0,
        },
    },
    tiny_preprocessor={
        "image_processor_type": "PixtralImageProcessor",
        "processor_class": "PixtralProcessor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": 4,
        "rescale_factor": 0.00392156862745098,
        "resample": 3,
        "size": {"longest_edge": 64},
    },
    tiny_image_tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    harmless={
        **AROUND_DECODER,
        **mistral4.FAMILY.harmless,
        "image_size": "preprocessor_config.json says how large images become",
        "image_seq_length": "the number of an image's tokens follows from its size",
        "is_composition": "says that the model has parts, which it names",
        "ignore_index": "acts in training only",
        "vision_feature_select_strategy": "is of a tower, where it is read",
    },
)
