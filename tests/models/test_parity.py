"""All families against transformers: figures written down in golden.json, and, where torch is
installed, transformers itself. And token by token, in chunks, and cut over devices (cut.py).

The cases cover head counts (MHA, GQA, MQA), explicit head sizes, biases, every rope type, windows
shorter than the prompt, and tied embeddings. write_golden.py makes the figures.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxllm.files import read_json
from jaxllm.testing import make_tiny_checkpoint
from tests.models.conftest import BLOCK_SIZE
from tests.models.cut import CASES, CUT, CUT_OTHERWISE, compute

TOLERANCE = 2e-4


class Case(NamedTuple):
    prompt: list[int]
    figures: dict[str, list[float]]
    model_dir: Path
    model: Any  # conftest.SingleRow
    logits: np.ndarray  # of the prompt as a whole


@pytest.fixture(scope="module")
def whole_logits():
    """Name -> logits on one device of the cases that have been computed."""
    return {}


@pytest.fixture(scope="module", params=CASES.keys())
def case(request, tmp_path_factory, single_row, whole_logits):
    figures = CASES[request.param]
    case = load(figures, tmp_path_factory.mktemp("model"), single_row)
    whole_logits[request.param] = case.logits
    return case


def load(figures, path, single_row):
    model_dir, prompt = checkpoint(figures, path), figures["prompt"]
    model = single_row(model_dir, num_blocks=max(16, -(-len(prompt) // BLOCK_SIZE)))
    return Case(prompt, figures, model_dir, model, model.logits(prompt))


def checkpoint(case, path, **options):
    return make_tiny_checkpoint(
        path, case["family"], seed=case["seed"], **(case["config"] | options)
    )


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def oracle(model_dir):
    pytest.importorskip("torch")
    import transformers

    (name,) = read_json(model_dir / "config.json")["architectures"]
    return getattr(transformers, name).from_pretrained(
        model_dir, dtype="float32", attn_implementation="eager"
    )


def test_logits_match_golden_figures(case):
    logits = case.logits
    logprobs = log_softmax(logits)[np.arange(len(logits) - 1), case.prompt[1:]]
    expected = case.figures["prompt_logprobs"], case.figures["last_logits"]
    np.testing.assert_allclose(logprobs, expected[0], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(logits[-1, :12], expected[1], atol=TOLERANCE, rtol=0)


def test_tokens_one_by_one_equal_the_whole_sequence(case):
    """From the first, and behind a chunk."""
    length, whole = len(case.prompt), case.logits
    is_recurrent = bool(case.model.abstract_model.state_configs)
    # By the program of the whole, in which the other tokens are padding.
    ones = [1] * 10
    decoded = case.model.logits(case.prompt, [*ones, length - 20, *ones], width=length)
    # Products of one row and of many round differently, by processor: of 15,000 logits of unit
    # variance a few were seen to be 1.1e-5 apart, where the mean is 1.3e-6.
    # Recurrent layers add single tokens up in another order than a whole tile, and their norms take
    # outputs that may be near zero: 9e-5 and 5e-6 were seen.
    atol, most_rms = (TOLERANCE, 1e-5) if is_recurrent else (2e-5, 3e-6)
    np.testing.assert_allclose(decoded, whole, atol=atol, rtol=0)
    assert np.sqrt(np.square(decoded - whole).mean()) < most_rms


@pytest.mark.parametrize("name", ["llama", "mistral-short-window"])
def test_uneven_chunks_equal_the_whole_sequence(name, tmp_path, single_row):
    model = single_row(checkpoint(CASES[name], tmp_path))
    prompt = CASES[name]["prompt"]
    # Neither multiples of the block size nor of the window.
    chunked = model.logits(prompt, chunks=[13, 13, 1, 13])
    np.testing.assert_allclose(chunked, model.logits(prompt), atol=1e-5, rtol=0)


@pytest.mark.oracle
def test_full_logits_match_transformers(case):
    reference = oracle(case.model_dir)
    import torch

    with torch.no_grad():
        expected = reference(torch.tensor([case.prompt]), use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(case.logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["llama", "mistral-short-window", "qwen2", "qwen3"])
def test_bfloat16_logprobs_stay_near_transformers(name, tmp_path, single_row):
    case = CASES[name]
    model_dir = checkpoint(case, tmp_path, dtype="bfloat16")
    reference = oracle(model_dir)
    import torch

    with torch.no_grad():
        expected = reference(torch.tensor([case["prompt"]])).logits[0].numpy()
    logprobs = log_softmax(single_row(model_dir, "bfloat16").logits(case["prompt"]))
    assert np.abs(logprobs - log_softmax(expected)).mean() < 0.02


@pytest.mark.oracle
def test_dynamic_rope_past_the_original_length_matches_transformers_token_by_token(
    tmp_path, single_row
):
    prompt = CASES["llama"]["prompt"]
    model_dir = make_tiny_checkpoint(
        tmp_path,
        max_position_embeddings=16,
        rope_scaling={"rope_type": "dynamic", "factor": 4.0},
    )
    reference = oracle(model_dir)
    import torch

    expected, cache = [], None
    with torch.no_grad():
        for token in prompt:
            out = reference(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            expected.append(out.logits[0, -1].numpy())
            cache = out.past_key_values
    logits = single_row(model_dir).logits(prompt)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def cut_logits(tmp_path_factory):
    return compute(CUT, tmp_path_factory.mktemp("cut"))


@pytest.fixture(scope="module")
def logits_cut_otherwise(tmp_path_factory):
    return compute(CUT_OTHERWISE, tmp_path_factory.mktemp("cut"))


@pytest.fixture
def on_one_device(whole_logits, name, tmp_path, single_row):
    if name not in whole_logits:  # heads that no case has, or a test that runs alone
        its = CUT.get(name) or CUT_OTHERWISE[name]
        whole_logits[name] = load(its, tmp_path, single_row).logits
    return whole_logits[name]


def each_cut(cases):
    pairs = [(name, num) for name, case in cases.items() for num in case["num_shards"]]
    return pytest.mark.parametrize(("name", "num_shards"), pairs)


@each_cut(CUT)
def test_logits_do_not_depend_on_the_number_of_devices(on_one_device, cut_logits, name, num_shards):
    assert_equal(on_one_device, cut_logits[name][str(num_shards)])


@pytest.mark.sweep
@each_cut(CUT_OTHERWISE)
def test_logits_do_not_depend_on_other_numbers(
    on_one_device, logits_cut_otherwise, name, num_shards
):
    cut = logits_cut_otherwise[name][str(num_shards)]
    if cut.ndim == 0:
        pytest.skip(str(cut))
    assert_equal(on_one_device, cut)


def assert_equal(whole, cut):
    assert np.isneginf(cut[:, whole.shape[1] :]).all()
    np.testing.assert_allclose(cut[:, : whole.shape[1]], whole, atol=1e-4, rtol=0)
