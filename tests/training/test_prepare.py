"""Models that a run begins with or learns from."""

import json
import shutil

import numpy as np
import pytest

from jaxllm.errors import ValidationError
from jaxllm.models.architecture import read_architecture
from jaxllm.training.export import export, hf_config
from jaxllm.training.forward import RowModel
from jaxllm.training.options import ShapeOptions
from jaxllm.training.prepare import load_initial_weights
from jaxllm.training.tokenizer import save_tokenizer, train_tokenizer

SHAPE = ShapeOptions(
    hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_size=8
)


@pytest.fixture
def exported(tmp_path):
    """A run's tokenizer, its model, first weights, and the directory of such a model."""
    tokenizer = train_tokenizer(["some text, and some more of it"] * 3, 300)
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    config = hf_config(SHAPE, tokenizer.get_vocab_size())
    model = RowModel(read_architecture(config))
    weights = model.initial_weights(0)
    export(tmp_path / "model", model, weights, config, tmp_path / "tokenizer")
    return tmp_path / "tokenizer", model, weights, tmp_path / "model"


def test_initial_weights_are_those_of_the_model(exported):
    tokenizer, model, weights, folder = exported
    found = load_initial_weights(str(folder), model, tokenizer)
    assert found.keys() == weights.keys()
    for name in found:
        np.testing.assert_allclose(found[name], weights[name], rtol=2**-8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_theta": 500_000.0},
            r"another model .* has layers\[0\]\.mixers\[0\]\.rope\.theta=500000",
        ),
        ({"rms_norm_eps": 1e-5}, r"it has layers\[0\]\.norm\.eps=1e-05, not 1e-06"),
    ],
)
def test_initial_weights_of_a_model_that_computes_otherwise_are_refused(exported, fields, message):
    tokenizer, model, _, folder = exported
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ValidationError, match=message):
        load_initial_weights(str(folder), model, tokenizer)


def test_initial_weights_for_other_tokens_are_refused(exported, tmp_path):
    tokenizer, model, _, folder = exported
    other = json.loads((tokenizer / "tokenizer.json").read_text())
    vocab = other["model"]["vocab"]
    (first, a), (second, b) = list(vocab.items())[-2:]
    vocab[first], vocab[second] = b, a
    shutil.copytree(tokenizer, tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(ValidationError, match="initial_model=.*it has other tokens"):
        load_initial_weights(str(folder), model, tmp_path / "other")
