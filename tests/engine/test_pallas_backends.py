"""A whole engine on emulated kernels gives the answers that it gives on XLA, however it comes to
compute them. Each test also makes sure that the engine really took the other way."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from jaxllm_kernels.compat import why_no_mosaic_gpu
from jaxllm_kernels.ragged_paged_attention.api import register_backend
from jaxllm_kernels.ragged_paged_attention.gpu import MosaicGpuBackend
from jaxllm_kernels.ragged_paged_attention.tpu import TpuBackend

from jaxllm import LLM, SamplingParams
from jaxllm.plan import buckets
from jaxllm.programs.identity import identity_hash
from jaxllm.runner import model_runner
from jaxllm.testing import make_tiny_checkpoint
from tests.emulator import improve_the_emulator

pytestmark = pytest.mark.slow

improve_the_emulator()
register_backend(TpuBackend(name="tpu_emulated", chip="v5e", interpret=True))
register_backend(MosaicGpuBackend(name="gpu_emulated", num_workers=2, interpret=True))

OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "check_invariants": True,
}


def prompt(index, length):
    return [3 + (index * 37 + j * j) % 300 for j in range(length)]


# One is longer than two blocks of 16. With 5 more tokens both long ones end in a block that they
# had not begun in, be it one of 8 or of 16.
PROMPTS = [prompt(i, length) for i, length in enumerate([5, 13, 45, 1])]
LONG = slice(1, 3)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=1, seed=1, max_tokens=5, logprobs=1, ignore_eos=True),
    SamplingParams(
        temperature=0, repetition_penalty=1.3, max_tokens=5, logprobs=1, ignore_eos=True
    ),
    SamplingParams(temperature=1, seed=2, max_tokens=3, logprobs=1, ignore_eos=True),
]


@dataclass(frozen=True)
class Kind:
    """Emulated kernels, with a model for them and sizes that their blocks allow."""

    backend: str
    checkpoint: dict[str, Any]
    dtype: str
    block_size: int
    other_block_size: int
    num_blocks: int  # exactly what PROMPTS take with their answers
    # The length of a prompt and of its answer: four prompts have room, but not with their answers.
    crowded: tuple[int, int]
    atol: float
    # In 16 bits two orders of summation seldom agree on a token. There the tokens are given, and
    # only their logprobs, which are of the logits as the model gives them, tell ways apart.
    forces_tokens: bool

    def params(self, params):
        if not self.forces_tokens:
            return params
        return [
            one.clone(temperature=0, logprobs=0, allowed_token_ids=[50 + 40 * i])
            for i, one in enumerate(params)
        ]


KINDS = {
    "tpu": Kind(
        backend="tpu_emulated",
        # A window in one of the layers.
        checkpoint={
            "family": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
        dtype="float32",
        block_size=8,
        other_block_size=16,
        num_blocks=13,
        crowded=(8, 26),
        atol=1e-5,
        forces_tokens=False,
    ),
    "gpu": Kind(
        backend="gpu_emulated",
        checkpoint={"family": "llama", "head_dim": 64, "dtype": "bfloat16"},
        dtype="bfloat16",
        block_size=16,
        other_block_size=32,
        num_blocks=8,
        crowded=(28, 6),
        atol=0.05,
        forces_tokens=True,
    ),
}
NO_GPU = pytest.mark.skipif(why_no_mosaic_gpu() is not None, reason=str(why_no_mosaic_gpu()))


@pytest.fixture(scope="module", params=["tpu", pytest.param("gpu", marks=NO_GPU)])
def kind(request):
    return KINDS[request.param]


# What the kernels have no part in but as in the other tests.
of_engines = pytest.mark.parametrize(
    "kind",
    ["tpu", pytest.param("gpu", marks=[NO_GPU, pytest.mark.sweep])],
    indirect=True,
    scope="module",
)


class SharedPrograms:
    """Keeps the programs of all engines in memory, since those that call Python, as emulated
    kernels do, cannot be kept on disk: compiling takes most of the time here."""

    def __init__(self):
        self.kept = {}

    def of(self, plan):
        return _ProgramsOf(identity_hash(plan), self.kept)


@dataclass(frozen=True)
class _ProgramsOf:
    identity: str
    kept: dict

    def load(self, key):
        return self.kept.get((self.identity, key))

    def find(self, key, lowered, module):
        return None

    def save(self, key, compiled, module):
        self.kept[self.identity, key] = compiled


@pytest.fixture(scope="module")
def make_llm(kind, tmp_path_factory):
    model = str(make_tiny_checkpoint(tmp_path_factory.mktemp("model"), **kind.checkpoint))
    options = OPTIONS | {
        "dtype": kind.dtype,
        "block_size": kind.block_size,
        "num_gpu_blocks_override": kind.num_blocks,
        "attention_backend": kind.backend,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "ProgramStore", SharedPrograms())
        # One mixed program of each engine, whatever the number of tokens: each takes long.
        patch.setattr(buckets, "_MIN_MIXED_TOKENS", OPTIONS["max_num_batched_tokens"])
        yield lambda **others: LLM(model, **options | others)


@pytest.fixture(scope="module")
def base(make_llm):
    return make_llm()


@pytest.fixture(scope="module")
def plain(make_llm):
    """XLA, with room for everything and nothing out of a cache."""
    return make_llm(
        attention_backend="xla", num_gpu_blocks_override=64, enable_prefix_caching=False
    )


@pytest.fixture(scope="module")
def params(kind):
    return kind.params(PARAMS)


@pytest.fixture(scope="module")
def expected(plain, params):
    return generate(plain, PROMPTS, params)


@pytest.fixture(scope="module")
def crowd(make_llm, params):
    """All requests at once, whole and cold; with what their engine counted."""
    llm = make_llm()
    return generate(llm, PROMPTS, params), llm.llm_engine.stats()


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def test_answers_are_those_of_xla(kind, crowd, expected, assert_same):
    outputs, stats = crowd
    assert_same(outputs, expected, kind.atol)
    assert stats.num_preemptions == 0
    assert stats.prefix_cache_hits == 0


@of_engines
def test_alone_is_as_in_a_crowd(kind, base, params, expected, assert_same):
    for one_prompt, its_params, wanted in zip(
        PROMPTS[LONG], params[LONG], expected[LONG], strict=True
    ):
        base.reset_prefix_cache()
        assert_same(generate(base, [one_prompt], its_params), [wanted], kind.atol)


def test_cached_is_cold(kind, base, params, expected, assert_same):
    base.reset_prefix_cache()
    generate(base, PROMPTS[LONG], [one.clone(max_tokens=1) for one in params[LONG]])
    hits = base.llm_engine.stats().prefix_cache_hits
    again = generate(base, PROMPTS[LONG], params[LONG])
    cached = [(len(p) - 1) // kind.block_size * kind.block_size for p in PROMPTS[LONG]]
    assert [out.num_cached_tokens for out in again] == cached
    assert base.llm_engine.stats().prefix_cache_hits - hits == sum(cached) > 0
    assert_same(again, expected[LONG], kind.atol)


@of_engines
def test_chunked_is_whole(kind, make_llm, params, expected, assert_same):
    # Seven divides no block, so chunks end and begin within them.
    llm = make_llm(long_prefill_token_threshold=7)
    assert_same(generate(llm, PROMPTS, params), expected, kind.atol)
    # The longest takes five steps for its prompt; whole it would be one.
    steps = len(PROMPTS[2]) // 7 + PARAMS[2].max_tokens - 1
    assert llm.llm_engine.stats().num_steps >= steps


def test_preempted_is_undisturbed(kind, make_llm, plain, assert_same):
    # All are admitted, but there is no room for all of their answers.
    length, max_tokens = kind.crowded
    prompts = [prompt(10 + i, length) for i in range(4)]
    params = kind.params([one.clone(max_tokens=max_tokens) for one in PARAMS])
    expected = generate(plain, prompts, params)
    assert plain.llm_engine.stats().num_preemptions == 0
    llm = make_llm(enable_prefix_caching=False)
    assert_same(generate(llm, prompts, params), expected, kind.atol)
    assert llm.llm_engine.stats().num_preemptions > 0


@of_engines
def test_overlapped_is_plain(kind, make_llm, base, params, expected, assert_same):
    llm = make_llm(async_scheduling=False)
    assert base.llm_engine.stats().overlap and not llm.llm_engine.stats().overlap
    assert_same(generate(llm, PROMPTS, params), expected, kind.atol)


@pytest.mark.sweep
def test_other_block_size_and_bucket_are_the_same(kind, make_llm, params, expected, assert_same):
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    llm = make_llm(block_size=kind.other_block_size, **sizes)
    assert llm.llm_engine.info.block_size == kind.other_block_size != kind.block_size
    assert_same(generate(llm, PROMPTS[LONG], params[LONG]), expected[LONG], kind.atol)
    # In programs of the size that they need, the prompts would be computed in one step.
    steps = sum(map(len, PROMPTS[LONG])) // 16 + PARAMS[2].max_tokens
    assert llm.llm_engine.stats().num_steps >= steps


@of_engines
def test_n_answers_are_separate_requests_with_the_same_seeds(
    kind, make_llm, plain, assert_same_answer
):
    llm = make_llm()
    params = SamplingParams(seed=11, max_tokens=5, logprobs=1, ignore_eos=True, n=2)
    if kind.forces_tokens:
        # Of the two, the seed chooses: at this temperature the model hardly has a say.
        params = params.clone(temperature=2, logprobs=0, allowed_token_ids=[50, 90])
    [together] = generate(llm, [PROMPTS[2]], params)
    # The prompt's full blocks are computed once for both.
    assert llm.llm_engine.stats().num_prompt_tokens < len(PROMPTS[2]) * 2
    for i, answer in enumerate(together.outputs):
        [alone] = generate(plain, [PROMPTS[2]], params.clone(n=1, seed=11 + i))
        assert_same_answer(answer, alone.outputs[0], kind.atol)


# Of the engine, which is tested so on XLA.
@pytest.mark.sweep
def test_streamed_is_final(base, params, expected, assert_streamed_is):
    assert_streamed_is(expected[LONG], base.llm_engine, PROMPTS[LONG], params[LONG])


@pytest.mark.parametrize("kind", [pytest.param("gpu", marks=NO_GPU)], indirect=True, scope="module")
def test_emulated_gpu_kernels_give_the_same_prompt_logprobs(make_llm, plain):
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, logprobs=0)
    prompts = [prompt(i, length) for i, length in enumerate([5, 21, 1])]

    def prompt_logprobs(llm):
        return [
            position[token].logprob
            for output in generate(llm, prompts, params)
            for token, position in zip(
                output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
            )
        ]

    expected = prompt_logprobs(plain)
    # Whole ones and one in chunks that end within blocks.
    llm = make_llm(long_prefill_token_threshold=7)
    np.testing.assert_allclose(prompt_logprobs(llm), expected, atol=0.05)
