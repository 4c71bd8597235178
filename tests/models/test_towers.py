"""Towers: embeddings and logits of prompts with images are those of transformers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.errors import CheckpointError
from jaxllm.files import read_json
from jaxllm.media.decode import places
from jaxllm.models.architecture import read_architecture
from jaxllm.models.registry import ModelRegistry, load_family
from jaxllm.models.tower import Images
from jaxllm.parallel.sharding import make_mesh
from jaxllm.quantization.linear import CodedLinear
from jaxllm.testing import tiny_config
from jaxllm.weights.loader import load_weights
from tests.media.models import make_model, make_pixtral, make_qwen2_5, make_qwen3, make_qwen3_5
from tests.models.conftest import STATE_OPS

# Rows and columns of patches.
GRIDS = [(2, 2), (4, 10), (16, 6)]


# Of a single token, of a row, and such as windows of 2 x 2 tokens do not divide.
OF_QWEN = [(2, 2), (2, 18), (10, 6), (14, 2), (12, 14)]
QWENS = {"qwen2.5": make_qwen2_5, "qwen3": make_qwen3, "qwen3.5": make_qwen3_5}

KINDS = {"mistral3": make_model, "pixtral-12b": make_pixtral}


def made_pixels(grid, patch_size, seed):
    rows, columns = (n * patch_size for n in grid)
    return np.random.default_rng(seed).standard_normal((3, rows, columns)).astype(np.float32)


def in_patches(pixels, patch_size, merge):
    """[C, H, W] -> patches [P, C * p * p] and their places, those of a token beside each other."""
    channels, height, width = pixels.shape
    grid = height // patch_size, width // patch_size
    cut = pixels.reshape(
        channels, grid[0] // merge, merge, patch_size, grid[1] // merge, merge, patch_size
    )
    patches = cut.transpose(1, 4, 2, 5, 0, 3, 6).reshape(grid[0] * grid[1], -1)
    places = np.indices(grid).transpose(1, 2, 0)
    places = places.reshape(grid[0] // merge, merge, grid[1] // merge, merge, 2)
    return patches, places.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def load_tower(path):
    """The tower's spec, and a function that runs it."""
    architecture = read_architecture(read_json(path / "config.json"), sees_images=True)
    abstract: Any = ModelRegistry.resolve([architecture.name]).abstract(architecture, jnp.float32)
    mesh = make_mesh(jax.devices()[:1])
    weights = load_weights(path, abstract, mesh=mesh)
    graphdef, _ = nnx.split(abstract)

    @jax.jit
    def embed(weights, pixels, places, starts):
        model: Any = nnx.merge(graphdef, weights)
        return model.tower(Images(pixels, places, starts), STATE_OPS, mesh)

    return architecture.tower, lambda *images: np.asarray(embed(weights, *map(jnp.array, images)))


def load_oracle(path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path, dtype="float32").eval()


@pytest.mark.oracle
@pytest.mark.parametrize("kind", KINDS)
def test_pixtral_is_as_in_transformers(kind, tmp_path):
    path = KINDS[kind](tmp_path)
    torch = pytest.importorskip("torch")
    tower: Any
    tower, embed = load_tower(path)
    oracle = load_oracle(path)
    images = [made_pixels(grid, 4, seed) for seed, grid in enumerate(GRIDS)]
    padded = np.zeros((len(images), 3, 64, 64), np.float32)
    for place, image in enumerate(images):
        padded[place, :, : image.shape[1], : image.shape[2]] = image
    sizes = torch.tensor([image.shape[1:] for image in images])
    with torch.no_grad():
        features = oracle.get_image_features(torch.tensor(padded), image_sizes=sizes).pooler_output
    expected = np.concatenate([one.numpy() for one in features])

    patches, places = zip(*(in_patches(image, 4, tower.merge) for image in images), strict=True)
    starts = np.cumsum([0, *map(len, patches)])
    starts = np.append(starts, starts[-1])  # an image of padding
    padding = 20
    pixels = np.concatenate([*patches, np.ones((padding, 48), np.float32)])
    where = np.concatenate([*places, np.zeros((padding, 2), np.int32)])
    out = embed(pixels, where, starts)
    assert np.isfinite(out).all()
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(out[: len(expected)], expected, atol=2e-4, rtol=0)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", QWENS)
def test_qwen_is_as_in_transformers(kind, tmp_path):
    path = QWENS[kind](tmp_path)
    torch = pytest.importorskip("torch")
    _, embed = load_tower(path)
    oracle = load_oracle(path)
    rng = np.random.default_rng(0)
    patches = [rng.standard_normal((rows * columns, 3, 16)) for rows, columns in OF_QWEN]
    pixels = np.concatenate(patches).astype(np.float32)
    doubled = torch.tensor(pixels[:, :, None].repeat(2, 2).reshape(len(pixels), -1))
    grid = torch.tensor([(1, *one) for one in OF_QWEN])
    with torch.no_grad():
        found = oracle.get_image_features(doubled, image_grid_thw=grid)
    expected = np.concatenate([one.numpy() for one in found.pooler_output])
    more = getattr(found, "deepstack_features", None) or ()
    expected = np.concatenate([expected, *(torch.cat(one).numpy() for one in more)], axis=1)

    where = np.concatenate([places(*one, 2) for one in OF_QWEN])
    starts = np.cumsum([0, *map(len, patches)])
    starts = np.append(starts, starts[-1])  # an image of padding
    flat = np.concatenate([pixels.reshape(len(pixels), -1), np.ones((20, 48), np.float32)])
    where = np.concatenate([where, np.zeros((20, 2), np.int32)])
    out = embed(flat, where, starts)
    assert np.isfinite(out).all()
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(out[: len(expected)], expected, atol=2e-4, rtol=0)


def test_a_tower_keeps_its_weights_where_others_become_codes(tmp_path):
    config = read_json(make_model(tmp_path) / "config.json")
    architecture = read_architecture(config, sees_images=True, quantization="int8")
    model = ModelRegistry.resolve([architecture.name]).abstract(architecture, jnp.float32)
    coded = [path for path, module in nnx.iter_graph(model) if isinstance(module, CodedLinear)]
    assert coded and all(path[0] == "model" for path in coded)


# Of each family with a tower, the fields that name tokens, and what its decoder needs beside one.
OF_QWENS = "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"
TOKENS = {
    "gemma3": (("image_token_index",), {"sliding_window": 32}),
    "gemma4": (("image_token_id", "boi_token_id", "eoi_token_id"), {}),
    "internvl": (("image_token_id",), {}),
    "mistral3": (("image_token_index",), {}),
    "qwen2": (OF_QWENS, {"rope_parameters": {"mrope_section": [2, 3, 3]}}),
    "qwen3": (OF_QWENS, {"rope_parameters": {"mrope_section": [6, 5, 5]}}),
    "qwen3_5": (OF_QWENS, {}),
}


@pytest.mark.parametrize("family", TOKENS)
def test_tokens_that_the_model_does_not_have_are_refused_by_name(family):
    fields, needed = TOKENS[family]
    decoder = tiny_config(family) | needed
    size = decoder["vocab_size"]
    outer = dict(load_family(family).tiny_config_around) | {"dtype": "float32"}
    outer["tie_word_embeddings"] = decoder.pop("tie_word_embeddings")
    outer["text_config"] = decoder
    for field in fields:
        assert read_architecture(outer | {field: size - 1}, sees_images=True).tower is not None
        says = f"{field}={size} must be below vocab_size={size}"
        with pytest.raises(CheckpointError, match=says):
            read_architecture(outer | {field: size}, sees_images=True)
