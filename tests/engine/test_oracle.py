"""The whole engine against transformers: golden tokens, and, where torch is installed, every logit
that its answers rest on.

The families come with what is particular to them: scaled rotary embeddings and biases, windows
shorter than the sequences in all layers or in one. The longest prompt is computed in chunks.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.testing import make_tiny_checkpoint

# write_golden.py makes the tokens.
CASES = json.loads(Path(__file__).with_name("golden.json").read_text())
TOLERANCE = 2e-4
NEAR_TIE = 1e-3  # logits that are closer may change places
PARAMS = SamplingParams(
    temperature=0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=2
)


# What has no kernels of this engine's own is compiled for every size of a step: these have but one.
SMALL_STEPS = 16


def answer(case, model_dir, step=64):
    llm = LLM(
        str(model_dir),
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=step,
        kv_cache_memory_bytes=4 << 20,
        check_invariants=True,
        enforce_eager=True,
    )
    return llm.generate(case["prompts"], PARAMS, use_tqdm=False)


@pytest.fixture(scope="module", params=CASES)
def answered(request, tmp_path_factory):
    """A case, its checkpoint, and what the engine made of it."""
    case = CASES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    make_tiny_checkpoint(path / "model", case["family"], seed=case["seed"], **case["config"])
    step = SMALL_STEPS if case["family"] == "llama4" else 64
    return case, path / "model", answer(case, path / "model", step)


def forward(model_dir, outputs):
    """Log probabilities [T - 1, V] of what follows each position of prompt + answer."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype="float32", attn_implementation="eager"
    )
    for output in outputs:
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].double()
        yield torch.log_softmax(logits, -1).numpy()


def assert_near(position, expected):
    """Compare the entries of one position with the oracle's log probabilities [V]."""
    for token, entry in position.items():
        assert entry.logprob == pytest.approx(expected[token], abs=TOLERANCE)
        ahead = (expected > expected[token] + NEAR_TIE).sum()
        level = (expected > expected[token] - NEAR_TIE).sum()
        assert ahead < entry.rank <= level


def test_tokens_are_the_golden_ones(answered):
    case, _, outputs = answered
    assert [output.outputs[0].token_ids for output in outputs] == case["tokens"]


@pytest.mark.oracle
def test_every_token_is_the_likeliest_of_transformers(answered):
    _, model_dir, outputs = answered
    for output, expected in zip(outputs, forward(model_dir, outputs), strict=True):
        [ours] = output.outputs
        assert len(ours.token_ids) == len(ours.logprobs) == PARAMS.max_tokens
        expected = expected[len(output.prompt_token_ids) - 1 :]
        second, first = np.sort(expected, -1)[:, -2:].T
        clear = first - second > NEAR_TIE
        assert clear.sum() > len(clear) / 2
        np.testing.assert_array_equal(np.array(ours.token_ids)[clear], expected.argmax(-1)[clear])
        for token, position, logprobs in zip(ours.token_ids, ours.logprobs, expected, strict=True):
            assert next(iter(position)) == token and len(position) == 2
            assert_near(position, logprobs)
        chosen = expected[np.arange(len(expected)), ours.token_ids]
        assert ours.cumulative_logprob == pytest.approx(chosen.sum(), abs=TOLERANCE * len(chosen))


@pytest.mark.oracle
def test_prompt_logprobs_are_those_of_transformers(answered):
    _, model_dir, outputs = answered
    for output, expected in zip(outputs, forward(model_dir, outputs), strict=True):
        prompt = output.prompt_token_ids
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for token, position, logprobs in zip(
            prompt[1:], output.prompt_logprobs[1:], expected[: len(prompt) - 1], strict=True
        ):
            assert next(iter(position)) == token
            assert_near(position, logprobs)


@pytest.mark.oracle
def test_bfloat16_stays_near_the_exact_result(tmp_path):
    # Against float32 on the same bfloat16 weights: transformers in bfloat16 rounds in other
    # places, so that the distance between the two would hide whose error it is.
    case = CASES["qwen3"]
    make_tiny_checkpoint(
        tmp_path, case["family"], seed=case["seed"], dtype="bfloat16", **case["config"]
    )
    outputs = answer(case, tmp_path)
    distances = []
    for output, expected in zip(outputs, forward(tmp_path, outputs), strict=True):
        of_prompt, of_answer = output.prompt_logprobs, output.outputs[0].logprobs
        assert of_prompt is not None and of_answer is not None
        positions = [position for position in of_prompt if position is not None] + of_answer
        for position, logprobs in zip(positions, expected, strict=True):
            distances += [abs(x.logprob - logprobs[token]) for token, x in position.items()]
    assert np.mean(distances) < 0.02
