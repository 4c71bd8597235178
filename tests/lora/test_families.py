"""Adapters of every family: laid out, they change a layer's weight as the checkpoint's tensors
would, changed by B A."""

import jax
import numpy as np
import pytest

from jaxllm.lora.adapter_file import Matrices
from jaxllm.lora.device import AdapterArrays, adaptable_layers
from jaxllm.models.architecture import read_architecture
from jaxllm.models.registry import ModelRegistry, family_names, load_family
from jaxllm.parallel.sharding import make_mesh
from jaxllm.testing import tiny_config

RANK = 3
# These write their weights [in, out], and what multiplies them is no layer for adapters.
WITHOUT = {"gpt2"}
# Fused tensors, rotated neighbours, latents, recurrent layers; the others are like these.
SOME = ("llama", "phi3", "glm", "deepseek_v2", "qwen3_next", "qwen2_moe")


class Changes:
    """B A of each layer, as the tensors of a checkpoint."""

    def __init__(self, adapter):
        self.adapter = adapter

    def copy(self, name, box, target, kind="float"):
        a, b = self.adapter[name.removesuffix(".weight")]
        target[...] = (b @ a)[box]


def check(family):
    architecture = read_architecture(tiny_config(family))
    model = ModelRegistry.resolve([architecture.name]).abstract(architecture, np.float32)
    random = np.random.default_rng(0)
    layers = adaptable_layers(model)
    assert bool(layers) == (family not in WITHOUT)
    adapter = {
        layer: Matrices(random.normal(size=(RANK, inputs)), random.normal(size=(outputs, RANK)))
        for layer, (inputs, outputs) in layers.items()
    }
    mesh = make_mesh(jax.devices()[:1])
    arrays = AdapterArrays.of(model, num_slots=2, rank=RANK + 1, dtype=np.float64, mesh=mesh)
    laid_out = arrays.lay_out(adapter)
    for target in arrays.targets:
        source = arrays.names.source(f"{target.name}.weight", target.pieces(target.num_inputs))
        expected = np.empty(source.shape)
        source.copy(Changes(adapter), tuple(slice(0, size) for size in source.shape), expected)
        a, b = laid_out[target.name]
        parts = [b_part[:, 0].T @ a_part for a_part, b_part in zip(a, b, strict=True)]
        np.testing.assert_allclose(np.concatenate(parts), expected, atol=1e-9)


@pytest.mark.parametrize("family", SOME)
def test_a_layer_changes_as_its_tensors_would(family):
    check(family)


@pytest.mark.sweep
@pytest.mark.parametrize("family", sorted(set(family_names()) - set(SOME)))
def test_a_layer_of_any_family_changes_as_its_tensors_would(family):
    check(family)


def test_towers_take_no_adapters():
    family = load_family("qwen3_5")
    config = {**family.tiny_config_around, "text_config": tiny_config("qwen3_5")}
    plain, seeing = (
        adaptable_layers(ModelRegistry.resolve([its.name]).abstract(its, np.float32))
        for its in (read_architecture(config, sees_images=sees) for sees in (False, True))
    )
    assert not any("visual" in layer for layer in seeing)
    found, expected = (
        {name: sizes for name, sizes in layers.items() if "model.language_model" in name}
        for layers in (seeing, plain)
    )
    assert found == expected and found
