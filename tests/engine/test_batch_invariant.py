"""With `batch_invariant` a request has the same bits whatever runs beside it, however its prompt is
cut, and whatever is cached. Everything here is compared by ==."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm import LLM, SamplingParams, ValidationError
from jaxllm.config import EngineConfig
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.summary import summary
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY

# Blocks for hardly more than one of four running requests, so that crowds are preempted.
FEW = TINY | {"batch_invariant": True, "num_gpu_blocks_override": 10, "check_invariants": True}


def prompt(index, length):
    return [3 + (index * 131 + i * i * 7 + i) % 380 for i in range(length)]


PROMPTS = [prompt(index, length) for index, length in enumerate([1, 17, 54, 30, 33, 48])]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=20),
    SamplingParams(seed=1, max_tokens=30, ignore_eos=True, logprobs=20),
    SamplingParams(
        seed=2, temperature=0.7, top_k=30, top_p=0.9, max_tokens=30, ignore_eos=True, logprobs=20
    ),
    SamplingParams(
        temperature=0, repetition_penalty=1.2, max_tokens=30, ignore_eos=True, logprobs=20,
        prompt_logprobs=3,
    ),
    SamplingParams(seed=3, min_p=0.02, max_tokens=30, ignore_eos=True, logprobs=20),
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=20),
]  # fmt: skip


def bits(output):
    """Tokens, and the float32 of every logprob, of the answer and of the prompt."""
    [answer] = output.outputs
    return (
        answer.token_ids,
        [{token: (its.logprob, its.rank) for token, its in at.items()} for at in answer.logprobs],
        [at and {token: its.logprob for token, its in at.items()} for at in output.prompt_logprobs]
        if output.prompt_logprobs
        else None,
    )


def generate(llm, prompts=PROMPTS, params=PARAMS):
    return list(map(bits, llm.generate(prompts, params, use_tqdm=False)))


def each_alone(llm, prompts=PROMPTS, params=PARAMS):
    answers = []
    for its, how in zip(prompts, params, strict=True):
        llm.reset_prefix_cache()
        answers += generate(llm, [its], [how])
    llm.reset_prefix_cache()
    return answers


def num_preemptions(llm):
    return llm.llm_engine.stats().num_preemptions


# The second one has experts, and delta nets with convolutions beside attention.
MODELS = {
    "dense": ("llama", {}),
    "experts and states": ("qwen3_next", {"mamba_block_size": 16}),
}


@pytest.fixture(scope="module", params=MODELS)
def llm(request, tmp_path_factory):
    family, options = MODELS[request.param]
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("model"), family)
    return LLM(str(model), **FEW | options)


@pytest.fixture(scope="module")
def alone(llm):
    answers = each_alone(llm)
    assert num_preemptions(llm) == 0
    return answers


def test_in_a_crowd_first_and_last_cut_otherwise_and_preempted(llm, alone):
    before = num_preemptions(llm)
    assert generate(llm) == alone
    assert num_preemptions(llm) > before
    llm.reset_prefix_cache()
    assert generate(llm, PROMPTS[::-1], PARAMS[::-1]) == alone[::-1]
    others = [prompt(100 + index, 5 + index) for index in range(29)]
    noise = SamplingParams(temperature=1.3, seed=9, max_tokens=8, logprobs=5)
    crowd = others + PROMPTS + others
    params = [noise] * 29 + PARAMS + [noise] * 29
    assert generate(llm, crowd, params)[29:-29] == alone


def test_after_a_prefix_hit(llm, alone):
    longest = PROMPTS[2] + alone[2][0][:20]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=20)
    llm.reset_prefix_cache()
    [cold] = generate(llm, [longest], [params])
    llm.reset_prefix_cache()
    # Blocks of a prompt, and of what was decoded.
    assert generate(llm, PROMPTS[2:3], PARAMS[2:3]) == alone[2:3]
    [output] = llm.generate([longest], [params], use_tqdm=False)
    assert output.num_cached_tokens == 64
    assert bits(output) == cold


def test_the_summary_says_so(tmp_path):
    model = str(make_tiny_checkpoint(tmp_path))
    assert ", batch-invariant\n" in summary(make_plan(EngineConfig.create(model, **FEW)))


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"tensor_parallel_size": 2}, "tensor_parallel_size=1"),
        ("llama", {"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ("llama", {"spec_model": "bundled-draft"}, "drafts by"),
        ("llama", {"native_kernels": False}, "our own kernels"),
        ("llama", {"attention_backend": "xla"}, "attention 'xla'"),
        ("llama", {"enable_lora": True}, "enable_lora"),
        ("falcon_h1", {}, "state spaces of Mamba"),
        ("lfm2", {"dtype": "bfloat16"}, "dtype='float32'"),
        # Of 64 inputs, which are no whole chunk.
        ("llama", {"quantization": "int4"}, "'xla', and 'native' ones"),
    ],
)
def test_what_does_not_keep_it_is_refused_by_name(tmp_path, family, options, message):
    model = make_tiny_checkpoint(tmp_path, family)
    with pytest.raises(ValidationError, match=f"^batch_invariant=True: .*{message}"):
        LLM(model, **TINY | {"batch_invariant": True} | options)


# A model's mechanism, or the engine's, and the programs of a larger engine: decodes of 4, 16 and 64
# rows, and mixed steps that are beyond the rows of native products otherwise.
LARGE = {
    "batch_invariant": True,
    "max_model_len": 256,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 1024,
    "block_size": 16,
    "num_gpu_blocks_override": 300,
    "enforce_eager": True,
    "check_invariants": True,
}
MECHANISMS = {
    "float32": ("llama", {}, {"dtype": "float32"}),
    "bfloat16": ("llama", {}, {"dtype": "bfloat16"}),
    "norms of heads": ("qwen3", {}, {"dtype": "float32"}),
    "windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
        {"dtype": "bfloat16", "kv_cache_request_len": 128},
    ),
    "soft caps": ("gemma2", {"head_dim": 16}, {"dtype": "float32", "kv_cache_request_len": 128}),
    "layer norms": ("gpt2", {}, {"dtype": "float32"}),
    "int8": ("llama", {}, {"dtype": "float32", "quantization": "int8"}),
    "int4": ("llama", {"hidden_size": 128}, {"dtype": "float32", "quantization": "int4"}),
    "fp8": ("llama", {}, {"dtype": "bfloat16", "quantization": "fp8"}),
    "experts": ("qwen3_moe", {"head_dim": 32}, {"dtype": "float32"}),
    "experts in bfloat16": ("qwen3_moe", {"head_dim": 32}, {"dtype": "bfloat16"}),
    "convolutions": ("lfm2", {}, {"dtype": "float32"}),
    "delta nets": ("qwen3_next", {}, {"dtype": "float32"}),
    # XLA's products with matrices of these sizes depend on the number of rows.
    "latents": (
        "deepseek_v3",
        {
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        {"dtype": "float32"},
    ),
    "latents in bfloat16": ("glm4_moe_lite", {}, {"dtype": "bfloat16"}),
    "latents beside Kimi's delta nets": ("kimi_linear", {}, {"dtype": "float32"}),
    "int8 cache": ("llama", {}, {"dtype": "float32", "kv_cache_dtype": "int8"}),
    "fp8 cache": ("llama", {}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
    "drafts": ("llama", {}, {"dtype": "float32", "spec_method": "ngram", "spec_tokens": 3}),
    "tiers": ("llama", {}, {"dtype": "float32", "kv_offloading_size": 0.01}),
    "tiers of states": (
        "qwen3_next",
        {},
        {"dtype": "float32", "kv_offloading_size": 0.1, "num_state_snapshots": 8},
    ),
}


@pytest.fixture(scope="module", params=MECHANISMS)
def large(request, tmp_path_factory):
    family, fields, options = MECHANISMS[request.param]
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("model"), family, **fields)
    return LLM(model, **LARGE | options)


@pytest.fixture(scope="module")
def each(large):
    """Prompts with their parameters and their answers alone."""
    prompts = [prompt(index, length) for index, length in enumerate([1, 3, 17, 40, 64, 90, 130, 7])]
    params = (PARAMS + PARAMS)[: len(prompts)]
    return list(zip(prompts, params, each_alone(large, prompts, params), strict=True))


@pytest.mark.sweep
@given(
    order=st.permutations(range(8)),
    others=st.lists(st.integers(1, 150), max_size=56),
    before=st.booleans(),
    resets=st.booleans(),
)
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_crowds_change_no_bit(large, each, order, others, before, resets):
    """Among up to 56 others, before or behind them, with or without hits."""
    if resets:
        large.reset_prefix_cache()
    mine, params, expected = zip(*(each[index] for index in order), strict=True)
    noise = [prompt(200 + index, length) for index, length in enumerate(others)]
    noise_params = [SamplingParams(temperature=1, seed=7, max_tokens=20, logprobs=2)] * len(noise)
    if before:
        answers = generate(large, noise + list(mine), noise_params + list(params))[len(noise) :]
    else:
        answers = generate(large, list(mine) + noise, list(params) + noise_params)[: len(mine)]
    assert answers == list(expected)
