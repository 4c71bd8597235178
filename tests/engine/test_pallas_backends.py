"""A whole engine on emulated kernels gives the tokens that it gives on XLA."""

import numpy as np
import pytest
from jaxllm_kernels.compat import why_no_mosaic_gpu
from jaxllm_kernels.ragged_paged_attention.api import register_backend
from jaxllm_kernels.ragged_paged_attention.gpu import MosaicGpuBackend
from jaxllm_kernels.ragged_paged_attention.tpu import TpuBackend

from jaxllm import LLM, SamplingParams
from jaxllm.testing import make_tiny_checkpoint

register_backend(TpuBackend(name="tpu_emulated", chip="v5e", interpret=True))
register_backend(MosaicGpuBackend(name="gpu_emulated", num_workers=2, interpret=True))

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 16,
    "num_gpu_blocks_override": 12,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "check_invariants": True,
}
PROMPTS = [
    [3 + (i * 37 + j * j) % 300 for j in range(length)] for i, length in enumerate([5, 21, 1])
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=4, logprobs=1, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=5, logprobs=1, ignore_eos=True, n=2),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # A window in one of the layers.
    return str(
        make_tiny_checkpoint(
            tmp_path_factory.mktemp("qwen2"),
            "qwen2",
            use_sliding_window=True,
            sliding_window=9,
            max_window_layers=1,
        )
    )


def answers(model, **options):
    llm = LLM(model, **{**OPTIONS, **options})
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [
        (
            list(completion.token_ids),
            [p[t].logprob for t, p in zip(completion.token_ids, completion.logprobs, strict=True)],
        )
        for output in outputs
        for completion in output.outputs
    ]


@pytest.fixture(scope="module")
def expected(model):
    return answers(model, attention_backend="xla")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tpu_emulated"])
@pytest.mark.parametrize(
    "change",
    [
        {},  # prompts in chunks, a prefix shared by the samples, steps overlapped
        {"enable_prefix_caching": False, "async_scheduling": False, "max_num_batched_tokens": 64},
        {"num_gpu_blocks_override": 4, "max_num_seqs": 3},  # with preemptions
    ],
    ids=["chunked", "whole", "preempted"],
)
def test_engine_gives_the_same_tokens(backend, change, model, expected):
    got = answers(model, attention_backend=backend, **change)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    for (_, mine), (_, other) in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(why_no_mosaic_gpu() is not None, reason=str(why_no_mosaic_gpu()))
def test_engine_on_emulated_gpu_kernels_gives_the_same_logprobs(tmp_path):
    # These kernels compute in 16 bits, where two orders of summation seldom agree on a token.
    model = make_tiny_checkpoint(tmp_path, "llama", head_dim=64, dtype="bfloat16")
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, logprobs=0)

    def prompt_logprobs(**options):
        options = {**OPTIONS, "dtype": "bfloat16", **options}
        outputs = LLM(str(model), **options).generate(PROMPTS, params, use_tqdm=False)
        return [
            position[token].logprob
            for output in outputs
            for token, position in zip(
                output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
            )
        ]

    expected = prompt_logprobs(attention_backend="xla")
    for tokens_per_step in (16, 64):
        got = prompt_logprobs(
            attention_backend="gpu_emulated", max_num_batched_tokens=tokens_per_step
        )
        np.testing.assert_allclose(got, expected, atol=0.05)
