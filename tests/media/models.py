"""A tiny model that sees images, an engine of it, and pictures."""

import io
import json

import numpy as np

from jaxllm.files import read_json
from jaxllm.testing import make_tiny_checkpoint, tiny_config, tiny_weights
from tests.profile import TINY

# An image of 64 x 64 pixels has 72 tokens, so that steps of 32 tokens cut it.
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
