"""Cutting a model into parts: who gets which layers, and what a part has of the rest."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxllm.files import read_json
from jaxllm.models.architecture import read_architecture
from jaxllm.models.part import split_model
from jaxllm.models.registry import ModelRegistry
from jaxllm.testing import make_tiny_checkpoint


def parameter_names(model):
    leaves = jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model)))
    return [".".join(str(key.key) for key in path) for path, _ in leaves]


@pytest.mark.parametrize(
    ("num_layers", "sizes"),
    [(8, [8]), (8, [4, 4]), (9, [5, 4]), (9, [2, 3, 2, 2]), (11, [3, 3, 3, 2]), (4, [1] * 4)],
)
def test_layers_are_split_evenly_and_the_last_part_has_the_fewest(num_layers, sizes):
    parts = split_model(num_layers, len(sizes))
    assert [len(part.layers) for part in parts] == sizes
    assert [layer for part in parts for layer in part.layers] == list(range(num_layers))
    assert [part.embeds for part in parts] == [True] + [False] * (len(sizes) - 1)
    assert [part.has_head for part in parts] == [False] * (len(sizes) - 1) + [True]
    assert parts[0].is_whole == (len(sizes) == 1)


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_parts_together_have_the_parameters_of_the_whole(family, is_tied, tmp_path):
    make_tiny_checkpoint(tmp_path, family, num_hidden_layers=5, tie_word_embeddings=is_tied)
    architecture = read_architecture(read_json(tmp_path / "config.json"))
    model_class = ModelRegistry.resolve([architecture.name])
    whole = model_class.abstract(architecture, jnp.float32)
    parts = [
        model_class.abstract(architecture, jnp.float32, part=part) for part in split_model(5, 3)
    ]
    names = sorted(name for part in parts for name in parameter_names(part))
    # A tied embedding is needed where tokens come in and where they go out.
    copies = ["model.embed_tokens.weight"] if is_tied else []
    assert names == sorted(parameter_names(whole) + copies)
    configs = [config for part in parts for config in part.attention_configs]
    assert configs == list(whole.attention_configs)
