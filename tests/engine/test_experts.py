"""Engines with experts: a request's tokens do not depend on the batch, or on how experts are
computed."""

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.errors import ValidationError
from jaxllm.testing import make_tiny_checkpoint

OPTIONS = {
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": 16,
    "num_gpu_blocks_override": 64,
    "enforce_eager": True,
    "dtype": "float32",
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=1)
PROMPTS = [
    {"prompt_token_ids": [3 + (i * 131 + j * j * 7 + j) % 380 for j in range(length)]}
    for i, length in enumerate([1, 5, 17, 40, 90])
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("moe"), "qwen3_moe"))


@pytest.fixture(scope="module")
def make_llm(model):
    return lambda **options: LLM(model, **OPTIONS, **options)


def answers(llm, prompts):
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [
        (output.outputs[0].token_ids, [*map(_logprob, output.outputs[0].logprobs)])
        for output in outputs
    ]


def _logprob(position):
    return max(entry.logprob for entry in position.values())


def same(ours, theirs):
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    for (_, first), (_, second) in zip(ours, theirs, strict=True):
        assert first == pytest.approx(second, abs=1e-4)


def test_tokens_alone_in_a_crowd_and_without_native_kernels(make_llm):
    llm = make_llm()
    together = answers(llm, PROMPTS)
    same([answers(llm, [prompt])[0] for prompt in PROMPTS], together)
    without = make_llm(native_kernels=False)
    same(answers(without, PROMPTS), together)


def test_a_model_without_experts_has_none_to_spread(tmp_path):
    model = str(make_tiny_checkpoint(tmp_path, "llama"))
    with pytest.raises(ValidationError, match="enable_expert_parallel=True: LlamaForCausalLM has"):
        LLM(model, **OPTIONS, enable_expert_parallel=True)
