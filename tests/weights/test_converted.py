"""Weights that are written as an engine holds them are those of the checkpoint."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxllm.cli.main import main
from jaxllm.config import EngineConfig
from jaxllm.errors import CheckpointError, ValidationError
from jaxllm.parallel.sharding import Part
from jaxllm.plan.make_plan import make_plan
from jaxllm.testing import make_tiny_checkpoint
from jaxllm.weights import converted
from jaxllm.weights.loader import Parameter, load_parts
from tests.profile import TINY

FLAGS = ["--dtype", "float32", "--quantization", "int8", "--no-native-kernels"]
OPTIONS = {"quantization": "int8", "native_kernels": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    source = make_tiny_checkpoint(path / "source", "qwen2")
    assert main(["convert", str(source), "--out", str(path / "out"), *FLAGS]) == 0
    return source, path / "out"


def parts_of(model, **options):
    plan = make_plan(EngineConfig.create(str(model), **(TINY | OPTIONS | options)))
    return [(plan.abstract_model(stage), stage.mesh) for stage in plan.stages]


def test_what_is_read_is_what_the_checkpoint_gives(models):
    source, out = models
    parts = parts_of(out, load_format="orbax")
    (found,), (expected,) = converted.load(out, parts), load_parts(source, parts)
    for ours, its in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == its.dtype and ours.sharding == its.sharding
        np.testing.assert_array_equal(ours, its)
    assert not list(out.glob("*.safetensors"))
    assert (out / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"quantization": "fp8"}, "converted with other options .*weight is .*int8"),
        ({"quantization": None}, "converted with other options"),
        ({"dtype": "bfloat16"}, "converted with other options .*'float32'.* wants .*bfloat16"),
    ],
)
def test_other_options_are_refused_by_the_parameter(models, options, error):
    with pytest.raises(CheckpointError, match=error):
        converted.load(models[1], parts_of(models[1], load_format="orbax", **options))


@pytest.mark.parametrize("change", [{"rows": 3}, {"columns": 3}, {"parts": (Part(4),)}])
def test_what_is_padded_or_fused_otherwise_is_described_otherwise(change):
    shape = {"shape": (4, 4), "dtype": np.dtype("float32"), "axes": (None, None)}
    parameter = Parameter(**shape, parts=(), rows=4)
    other = dataclasses.replace(parameter, **change)
    assert converted._describe(parameter) != converted._describe(other)


def test_other_devices_versions_and_damage_are_refused(models, tmp_path):
    _, out = models
    parts = parts_of(out, load_format="orbax")
    with pytest.raises(CheckpointError, match="has no engine_weights.json"):
        converted.load(models[0], parts)
    facts = json.loads((out / "engine_weights.json").read_text())
    for change, kind, error in (
        ({"version": 0}, CheckpointError, "has version 0, and this is 1"),
        ({"tensor_parallel_size": 4}, ValidationError, "tensor_parallel_size=1: .* with 4"),
        ({"parameters": 3}, CheckpointError, "does not list the parameters"),
    ):
        (tmp_path / "engine_weights.json").write_text(json.dumps(facts | change))
        with pytest.raises(kind, match=error):
            converted.load(tmp_path, parts)
    (tmp_path / "engine_weights.json").write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match="cannot be read"):
        converted.load(tmp_path, parts)
