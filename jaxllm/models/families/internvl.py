"""InternVL 3 and 3.5, as transformers has them: InternViT before a Qwen2, Qwen3 or Qwen3-MoE.

The decoder is as that of its own family, and an image is as any other tokens to it.
"""

from jaxllm.errors import UnsupportedModelError, shown
from jaxllm.models.around_decoder import beside_vision_tower, inside_larger_model
from jaxllm.models.checkpoint_map import CheckpointMap
from jaxllm.models.families import qwen2, qwen3, qwen3_moe
from jaxllm.models.family import Family
from jaxllm.models.harmless import AROUND_DECODER
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture
from jaxllm.models.towers import internvl

_DECODERS = {"qwen2": qwen2.FAMILY, "qwen3": qwen3.FAMILY, "qwen3_moe": qwen3_moe.FAMILY}


def read(name: str, config: HFConfig) -> Architecture:
    text = config.inside("text_config")
    kind = text.get("model_type", "qwen2")
    if kind not in _DECODERS:
        raise UnsupportedModelError(
            f"config.json: model_type={shown(kind)} in text_config is not supported; supported are "
            f"{', '.join(map(repr, _DECODERS))}"
        )
    return _DECODERS[kind].read(name, text)


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    decoder = _DECODERS["qwen3_moe" if architecture.num_experts else "qwen3"]
    names = decoder.checkpoint(architecture)
    if architecture.tower is None:
        return inside_larger_model(names)
    return beside_vision_tower(
        names, architecture.tower, towers=("vision_tower",), told_by="embeddings.cls_token"
    )


_IMAGE_TOKEN, _BEFORE, _BEHIND = "<IMG_CONTEXT>", "<img>", "</img>"

FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
    tiny=qwen3.FAMILY.tiny,
    tower=internvl.read,
    tiny_config_around={
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "image_token_id": 3,
        "image_seq_length": 16,
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "vision_config": {
            "model_type": "internvl_vision",
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "attention_bias": True,
            "image_size": [32, 32],
            "patch_size": [4, 4],
        },
    },
    tiny_preprocessor={
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "processor_class": "InternVLProcessor",
        "crop_to_patches": False,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
        "max_patches": 6,
        "min_patches": 1,
        "rescale_factor": 0.00392156862745098,
        "resample": 3,
        "size": {"height": 32, "width": 32},
    },
    tiny_image_tokens=(_IMAGE_TOKEN, _BEFORE, _BEHIND),
    harmless={
        **AROUND_DECODER,
        **qwen2.FAMILY.harmless,
        **qwen3.FAMILY.harmless,
        **qwen3_moe.FAMILY.harmless,
        "downsample_ratio": "is of the tower, where it is read",
        "drop_path_rate": "acts in training only: layers that are left out at random",
        "dropout": "acts in training only",
        "projection_dropout": "acts in training only",
        "image_seq_length": "the number of a tile's tokens follows from its size",
        "layer_scale_init_value": "how the factors of layers begin; the checkpoint has them",
        "vision_feature_select_strategy": "is of the tower, where it is read",
    },
)
