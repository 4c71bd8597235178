"""The trained forward pass is the one of transformers, and the one that serves."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.errors import UnsupportedModelError
from jaxllm.files import read_json
from jaxllm.models.architecture import read_architecture
from jaxllm.testing import make_tiny_checkpoint, tiny_config
from jaxllm.training.forward import RowModel
from jaxllm.training.objective import distance, surprise

# Longer than a block of queries, and than the window of the tiny Mistral.
ROWS = np.random.default_rng(0).integers(3, 384, (2, 301))


def load(path) -> tuple[RowModel, dict]:
    model = RowModel(read_architecture(read_json(path / "config.json")))
    return model, model.load(path)


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_loss_is_that_of_transformers(family, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    path = make_tiny_checkpoint(tmp_path, family)
    model, weights = load(path)
    ours = jnp.mean(surprise(model.logits(weights, ROWS[:, :-1]), ROWS[:, 1:]))
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rows = torch.tensor(ROWS)
    with torch.no_grad():
        loss = theirs(rows, labels=rows).loss.item()
    np.testing.assert_allclose(float(ours), loss, rtol=2e-5)


def test_log_probabilities_are_those_of_the_engine(tmp_path):
    path = make_tiny_checkpoint(tmp_path, "llama")
    model, weights = load(path)
    prompt = ROWS[0, :60]
    ours = -np.asarray(surprise(model.logits(weights, prompt[None, :-1]), prompt[None, 1:]))[0]
    llm = LLM(path, enforce_eager=True, max_num_seqs=2, max_num_batched_tokens=64)
    params = SamplingParams(prompt_logprobs=0, max_tokens=1)
    [output] = llm.generate({"prompt_token_ids": prompt.tolist()}, params, use_tqdm=False)
    found = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    theirs = [at[token].logprob for at, token in found]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_padding_costs_nothing():
    logits = jnp.zeros((1, 3, 8))
    costs = surprise(logits, jnp.array([[2, -1, 7]]))
    np.testing.assert_allclose(costs, [[np.log(8), 0, np.log(8)]], rtol=1e-6)


def test_distance_is_zero_for_equals_and_kl_for_others():
    student, teacher = np.array([[0.3, -1.0, 2.0], [1.0, 1.0, 1.0]])[:, None]
    np.testing.assert_allclose(distance(teacher, teacher, 2.0), 0, atol=1e-6)
    p, q = (np.exp(x / 2) / np.exp(x / 2).sum() for x in (teacher[0], student[0]))
    kl = (p * np.log(p / q)).sum()
    np.testing.assert_allclose(distance(student, teacher, 2.0), [4 * kl], rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("mixtral", "models with experts are not trained"),
        ("gpt_oss", "are not trained"),
        ("deepseek_v3", "models with latent attention are not trained"),
    ],
)
def test_models_that_cannot_be_trained_are_refused_by_name(family, message):
    with pytest.raises(UnsupportedModelError, match=message):
        RowModel(read_architecture(tiny_config(family) | {"dtype": "float32"}))
