"""A tiny engine that takes prompts of embeddings, and those of its model's tokens."""

import base64
import io

import numpy as np

from tests.profile import TINY

# Steps of 32 tokens cut prompts, and four long requests do not fit into the blocks.
OPTIONS = TINY | {
    "enable_prompt_embeds": True,
    "check_invariants": True,
    "num_gpu_blocks_override": 16,
}


def table(path):
    """The embeddings of a model's tokens."""
    from safetensors.numpy import load_file

    tensors = load_file(path / "model.safetensors")
    names = [name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight"))]
    return tensors[names[0]]


def numpy_file(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def safetensors_file(array, **more):
    from safetensors.numpy import save

    return save({"prompt": np.ascontiguousarray(array), **more})


def in_base64(data):
    return base64.b64encode(data).decode()
