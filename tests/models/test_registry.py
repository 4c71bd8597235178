"""Lookup of model classes, and classes from outside the package."""

import pytest

from jaxllm.errors import UnsupportedModelError
from jaxllm.models.registry import ModelRegistry
from jaxllm.testing import make_tiny_checkpoint

OUTSIDE = """
from jaxllm.models.decoder import DecoderForCausalLM

class HalfLogits(DecoderForCausalLM):
    def compute_logits(self, hidden):
        return super().compute_logits(hidden) / 2
"""


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(ModelRegistry, "_classes", dict(ModelRegistry._classes))
    monkeypatch.setattr(ModelRegistry, "_families", dict(ModelRegistry._families))
    return ModelRegistry


def test_first_supported_architecture_wins():
    assert ModelRegistry.select(["Unknown", "Qwen3ForCausalLM"]) == "Qwen3ForCausalLM"


def test_unknown_architectures_are_listed_with_the_known_ones():
    with pytest.raises(UnsupportedModelError, match="Foo, Bar.*MistralForCausalLM"):
        ModelRegistry.resolve(["Foo", "Bar"])


def test_malformed_class_path_is_refused(registry):
    with pytest.raises(ValueError, match="module:Class"):
        registry.register_model("Own", "module.Class")


def test_family_from_outside_reads_its_configs(registry, tmp_path, single_row):
    registry.register_model("Own", family="jaxllm.models.families.qwen3:FAMILY")
    fields = {"architectures": ["Own"], "head_dim": 32, "tie_word_embeddings": True}
    own = single_row(make_tiny_checkpoint(tmp_path / "own", **fields))
    qwen3 = single_row(make_tiny_checkpoint(tmp_path / "qwen3", "qwen3"))
    assert (own.logits([5, 6, 7]) == qwen3.logits([5, 6, 7])).all()


def test_class_from_outside_runs_its_architecture(registry, monkeypatch, tmp_path, single_row):
    (tmp_path / "outside_model.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    registry.register_model("HalfLogits", "outside_model:HalfLogits")
    plain = single_row(make_tiny_checkpoint(tmp_path / "plain"))
    own = single_row(make_tiny_checkpoint(tmp_path / "own", architectures=["HalfLogits"]))
    assert (own.logits([5, 6, 7]) * 2 == plain.logits([5, 6, 7])).all()
