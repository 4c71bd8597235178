"""A tiny model that sees images, an engine of it, and pictures."""

import io
import json
from pathlib import Path

import numpy as np

from jaxllm.files import read_json
from jaxllm.testing import make_tiny_checkpoint, tiny_config, tiny_weights
from tests.profile import TINY

# An image of 64 x 64 pixels has 72 tokens, so that steps of 32 tokens cut it.
GOLDEN = Path(__file__).parents[1] / "models/golden.json"
OPTIONS = TINY | {"max_model_len": 256, "check_invariants": True, "num_gpu_blocks_override": 128}


def make_model(path):
    return make_tiny_checkpoint(
        path,
        "mistral3",
        sees_images=True,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters=tiny_config("mistral3")["rope_parameters"]
        | {"original_max_position_embeddings": 128, "max_position_embeddings": 512},
    )


def make_pixtral(path):
    """The same as Pixtral 12B has it: without a merger, in the class of Llava."""
    from safetensors.numpy import save_file

    make_model(path)
    config = read_json(path / "config.json")
    config |= {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_feature_select_strategy": "full",
        "multimodal_projector_bias": True,
        "image_seq_length": 1,
    }
    del config["spatial_merge_size"]
    text, vision = config["text_config"], config["vision_config"]
    text |= {"model_type": "mistral", "rope_parameters": None, "rope_theta": 1e4}
    vision |= {"rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}}
    del vision["rope_theta"]
    (path / "config.json").write_text(json.dumps(config))
    save_file(tiny_weights(config, 0), path / "model.safetensors", metadata={"format": "pt"})
    return path


def make_qwen2_5(path):
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    return make_tiny_checkpoint(
        path,
        "qwen2",
        sees_images=True,
        model_type="qwen2_5_vl_text",
        max_position_embeddings=512,
        rope_theta=1e4,
        rope_parameters=sections,
    )


def make_qwen3(path):
    sections = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    return make_tiny_checkpoint(
        path,
        "qwen3",
        sees_images=True,
        model_type="qwen3_vl_text",
        num_hidden_layers=3,
        max_position_embeddings=512,
        rope_theta=1e4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, **sections},
    )


def make_qwen3_moe(path):
    """As releases have it: all experts of a layer in two tensors."""
    sections = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    return make_tiny_checkpoint(
        path,
        "qwen3_moe",
        sees_images=True,
        model_type="qwen3_vl_moe_text",
        head_dim=32,
        mlp_only_layers=[],
        moe_intermediate_size=48,  # transformers looks at shapes for the order of axes
        max_position_embeddings=512,
        rope_theta=1e4,
        rope_scaling={"rope_type": "default", **sections},
    )


def make_qwen3_5(path):
    """A layer with a state and one with pages, of which a half of each head is rotated."""
    sections = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, **sections}
    return make_tiny_checkpoint(
        path,
        "qwen3_5",
        sees_images=True,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        max_position_embeddings=512,
        rope_parameters=rope,
    )


def make_qwen3_5_moe(path):
    """The same with experts, each in tensors of its own."""
    from safetensors.numpy import save_file

    config = read_json(make_qwen3_5(path) / "config.json")
    config |= {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
    }
    config["vision_config"]["model_type"] = "qwen3_5_moe_vision"
    of_experts = read_json(GOLDEN)["qwen3.5-moe"]["config"]
    text = config["text_config"] | of_experts
    config["text_config"] = {name: value for name, value in text.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tiny_weights(config, 0), path / "model.safetensors", metadata={"format": "pt"})
    return path


def picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def encoded(image, kind="PNG", **options):
    """The bytes of a file with an image of Pillow, or of an array."""
    from PIL import Image

    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def make_gemma3(path):
    """Layers with a window that is a little longer than an image, and one without."""
    return make_tiny_checkpoint(
        path,
        "gemma3",
        sees_images=True,
        num_hidden_layers=3,
        head_dim=16,
        sliding_window=20,
        max_position_embeddings=512,
    )


def make_gemma4(path, **fields):
    """Layers with a window shorter than an image, which its tokens see within, and without; some
    without keys of their own, and inputs of layers."""
    layers = ["sliding_attention", "full_attention"] * 2
    text = {
        "num_hidden_layers": 4,
        "layer_types": layers,
        "num_kv_shared_layers": 2,
        "sliding_window": 20,
        "use_bidirectional_attention": "vision",
        "max_position_embeddings": 512,
        "pad_token_id": 7,
    }
    return make_tiny_checkpoint(path, "gemma4", sees_images=True, **text | fields)


def make_internvl(path, decoder="qwen3", *, vision=(), **fields):
    """Before a decoder of another family, and with other fields of the tower."""
    from safetensors.numpy import save_file

    make_tiny_checkpoint(path, "internvl", sees_images=True, max_position_embeddings=512)
    config = read_json(path / "config.json") | fields
    text = tiny_config(decoder) | {"max_position_embeddings": 512}
    text.pop("tie_word_embeddings")
    config |= {"text_config": text, "vision_config": config["vision_config"] | dict(vision)}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tiny_weights(config, 0), path / "model.safetensors", metadata={"format": "pt"})
    return path
