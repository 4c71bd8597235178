"""LongRoPE has factors for short and for long sequences; an engine uses one of them throughout."""

import numpy as np
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.files import read_json
from jaxllm.layers.rope import LongRopeScaling
from jaxllm.models.architecture import read_architecture
from jaxllm.testing import make_tiny_checkpoint

SHORT, LONG = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7), (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 80.0)
ORIGINAL = 64
CONFIG = {
    "sliding_window": None,
    "max_position_embeddings": 256,
    "original_max_position_embeddings": ORIGINAL,
    "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
}


def checkpoint(path, **changes):
    return make_tiny_checkpoint(path, "phi3", **CONFIG | changes)


def factors(model_dir, max_model_len=None):
    architecture = read_architecture(
        read_json(model_dir / "config.json"), max_model_len=max_model_len
    )
    (scaling,) = {layer.rope.scaling for layer in architecture.layers}
    assert isinstance(scaling, LongRopeScaling)
    # The ratio of lengths is four.
    assert scaling.attention_factor == pytest.approx(np.sqrt(1 + np.log(4) / np.log(ORIGINAL)))
    return scaling.factors


@pytest.mark.parametrize(
    ("max_model_len", "expected"), [(None, LONG), (65, LONG), (64, SHORT), (8, SHORT)]
)
def test_factors_follow_the_longest_sequence_of_the_engine(max_model_len, expected, tmp_path):
    assert factors(checkpoint(tmp_path), max_model_len) == expected


def test_without_a_longer_context_the_short_factors_apply(tmp_path):
    model_dir = checkpoint(tmp_path, max_position_embeddings=ORIGINAL)
    scaling = read_architecture(read_json(model_dir / "config.json")).layers[0].rope.scaling
    assert scaling == LongRopeScaling(factors=SHORT, attention_factor=1.0)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("max_model_len", "length"), [(ORIGINAL, ORIGINAL), (128, ORIGINAL + 1)], ids=["short", "long"]
)
def test_logits_match_transformers(max_model_len, length, tmp_path, single_row):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model_dir = checkpoint(tmp_path)
    prompt = np.random.default_rng(0).integers(3, 384, length).tolist()
    reference = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype="float32", attn_implementation="eager"
    )
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0].numpy()
    model = single_row(model_dir, max_model_len=max_model_len, num_blocks=17)
    logits = model.logits(prompt)
    np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("max_model_len", "expected"), [(ORIGINAL, SHORT), (128, LONG), (None, LONG)]
)
def test_an_engine_plans_with_its_own_length(max_model_len, expected, tmp_path):
    from jaxllm.config import EngineConfig
    from jaxllm.plan.make_plan import make_plan

    config = EngineConfig.create(str(checkpoint(tmp_path)), max_model_len=max_model_len)
    scaling = make_plan(config).architecture.layers[0].rope.scaling
    assert scaling.factors == expected


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("short_factor", None, "short_factor=None must be a list of 8"),
        ("long_factor", [1.0] * 6, "long_factor=.* must be a list of 8"),
        ("long_factor", [1.0] * 7 + ["2"], "long_factor='2' must be above zero"),
    ],
)
def test_lists_of_another_size_are_refused(name, value, message, tmp_path):
    fields = read_json(checkpoint(tmp_path) / "config.json")
    fields["rope_scaling"][name] = value
    with pytest.raises(CheckpointError, match=message):
        read_architecture(fields)
