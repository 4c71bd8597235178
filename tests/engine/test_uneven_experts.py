"""Engines whose routers are biased: one expert gets every token, one gets one, some get none.

Answers are those of transformers, alone and in a crowd, and the tokens of each expert are counted.
"""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, SamplingParams
from jaxllm.errors import ValidationError
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY

# Both layers have experts, 8 of them, of which a token chooses 3.
NUM_EXPERTS, NUM_CHOICES = 8, 3
EVERY, ONE, NONE = 0, 1, 7
PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=2, prompt_logprobs=2)
PROMPTS = [
    {"prompt_token_ids": [3 + (i * 131 + j * j * 7 + j) % 380 for j in range(length)]}
    for i, length in enumerate([1, 5, 17, 7])
]
NUM_TOKENS = 30  # a step


def write_biases(model_dir, biases):
    tensors = load_file(model_dir / "model.safetensors")
    for layer, of_layer in enumerate(biases):
        tensors[f"model.layers.{layer}.mlp.router.bias"] = np.asarray(of_layer, np.float32)
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})


def router_logits(model_dir, layer):
    """Of all tokens of all prompts, by transformers."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = transformers.GptOssForCausalLM.from_pretrained(
        model_dir, dtype="float32", attn_implementation="eager"
    )
    found = []
    router = model.model.layers[layer].mlp.router
    router.register_forward_hook(
        lambda its, inputs, _: found.append(
            torch.nn.functional.linear(inputs[0].reshape(-1, 64), its.weight, its.bias)
        )
    )
    with torch.no_grad():
        for prompt in PROMPTS:
            model(torch.tensor([prompt["prompt_token_ids"]]))
    return torch.cat(found).numpy()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model in which every token chooses one expert, one token another, and none a third."""
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("uneven"), "gpt_oss")
    biases = np.zeros((2, NUM_EXPERTS))
    biases[:, EVERY], biases[:, NONE], biases[:, ONE] = 30, -30, -30
    for layer in range(2):
        write_biases(path, biases)
        logits = router_logits(path, layer)
        # What the bias lacks for each token to choose the expert: the least goes to one token.
        lacking = np.sort(logits, axis=1)[:, -NUM_CHOICES] - logits[:, ONE]
        least, next_least = np.sort(lacking)[:2]
        assert next_least - least > 1e-3
        biases[layer, ONE] += (least + next_least) / 2
    write_biases(path, biases)
    return path


@pytest.fixture(scope="module")
def llm(model):
    return LLM(str(model), **TINY, count_expert_tokens=True)


def answers(llm, prompts):
    """Of each prompt, its token and all logprobs."""
    return [
        (
            output.outputs[0].token_ids,
            [
                sorted((token, entry.logprob) for token, entry in position.items())
                for position in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs)
            ],
        )
        for output in llm.generate(prompts, PARAMS, use_tqdm=False)
    ]


def expert_tokens(llm):
    """The figures of all experts, by layer."""
    found = [metric for metric in llm.get_metrics() if metric.name == "jaxllm:expert_tokens"]
    assert len(found) == 2 * NUM_EXPERTS
    by_layer = np.zeros((2, NUM_EXPERTS))
    for metric in found:
        by_layer[int(metric.labels["layer"]), int(metric.labels["expert"])] = metric.value
    return by_layer


def test_each_expert_counts_its_tokens(llm):
    before = expert_tokens(llm)
    answers(llm, PROMPTS)
    by_layer = expert_tokens(llm) - before
    # Padding counts nowhere.
    assert by_layer.sum(1).tolist() == 2 * [NUM_TOKENS * NUM_CHOICES]
    assert by_layer[:, EVERY].tolist() == [NUM_TOKENS, NUM_TOKENS]
    assert by_layer[:, ONE].tolist() == [1, 1]
    assert by_layer[:, NONE].tolist() == [0, 0]


def test_answers_do_not_depend_on_the_crowd_and_are_those_of_transformers(llm, model):
    together = answers(llm, PROMPTS)
    for prompt, (tokens, logprobs) in zip(PROMPTS, together, strict=True):
        ((alone, of_alone),) = answers(llm, [prompt])
        assert alone == tokens
        of_both = zip(of_alone, logprobs, strict=True)
        assert all(np.allclose(one, other, atol=1e-4) for one, other in of_both)
        expected = by_transformers(model, [*prompt["prompt_token_ids"], *tokens])
        for position, entries in enumerate(logprobs):
            for token, logprob in entries:
                assert logprob == pytest.approx(expected[position, token], abs=2e-4)


def by_transformers(model_dir, token_ids):
    """Log probabilities [T - 1, V] of what follows each position."""
    import torch
    import transformers

    model = transformers.GptOssForCausalLM.from_pretrained(
        model_dir, dtype="float32", attn_implementation="eager"
    )
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1].double()
    return torch.log_softmax(logits, -1).numpy()


def test_a_model_without_experts_has_none_to_count(tmp_path):
    model = str(make_tiny_checkpoint(tmp_path))
    with pytest.raises(ValidationError, match="count_expert_tokens=True: LlamaForCausalLM has no"):
        LLM(model, **TINY, count_expert_tokens=True)
