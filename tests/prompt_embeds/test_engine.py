"""Prompts of embeddings: those of tokens are as the tokens, whatever else the engine does."""

import subprocess
import sys

import numpy as np
import pytest

from jaxllm import LLM, BeamSearchParams, LoRARequest, SamplingParams
from jaxllm.errors import UnsupportedModelError, ValidationError
from jaxllm.sampling.slot_state import PROMPT_BIT, slot_row
from jaxllm.scheduler.schedule import NO_TOKEN, Admission
from jaxllm.testing import make_tiny_adapter, make_tiny_checkpoint
from tests.media.models import make_model, make_qwen3, picture
from tests.profile import TINY
from tests.prompt_embeds.models import OPTIONS, table

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3)
# Steps have 32 tokens, blocks 16.
LENGTHS = (1, 2, 16, 33, 64, 90)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def embeddings(model):
    return table(model)


@pytest.fixture(scope="module")
def llm(model):
    llm = LLM(model, **OPTIONS)
    yield llm
    llm.shutdown()


def ids_of(length):
    return np.random.default_rng(length).integers(3, 380, length).tolist()


def answers(llm, prompts, params=PARAMS):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(one.token_ids, one.logprobs) for output in outputs for one in output.outputs]


def assert_equal(found, expected):
    for (tokens, logprobs), (wanted, of_wanted) in zip(found, expected, strict=True):
        assert tokens == wanted
        for position, its in zip(logprobs, of_wanted, strict=True):
            for token, value in its.items():
                assert abs(position[token].logprob - value.logprob) < 1e-4


def test_embeddings_of_tokens_are_as_the_tokens(llm, embeddings):
    tokens = [{"prompt_token_ids": ids_of(length)} for length in LENGTHS]
    given = [{"prompt_embeds": embeddings[ids_of(length)]} for length in LENGTHS]
    expected = []
    for one, its in zip(tokens, given, strict=True):
        assert llm.reset_prefix_cache()
        expected += answers(llm, [one])
        assert llm.reset_prefix_cache()
        assert_equal(answers(llm, [its]), expected[-1:])
        assert_equal(answers(llm, [its]), expected[-1:])  # cached
    (output,) = llm.generate(given[-1], PARAMS, use_tqdm=False)
    assert output.num_cached_tokens == 80 and output.prompt_token_ids == [0] * 90
    assert llm.reset_prefix_cache()
    text = {"prompt": "Text alone"}
    crowd = answers(llm, [*given, text, *tokens, *given])
    assert_equal(crowd, [*expected, crowd[len(given)], *expected, *expected])
    assert_equal(answers(llm, [text]), [crowd[len(given)]])


@pytest.mark.oracle
def test_answers_are_those_of_transformers(llm, model, embeddings):
    """To embeddings of no token."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    prompt = np.random.default_rng(1).normal(size=(40, 64)) * embeddings.std()
    prompt = prompt.astype(np.float32)
    ((tokens, logprobs),) = answers(llm, [{"prompt_embeds": prompt}])
    whole = torch.tensor(np.concatenate([prompt, embeddings[tokens]]))
    with torch.no_grad():
        logits = oracle(inputs_embeds=whole[None]).logits[0]
    expected = torch.log_softmax(logits, -1).numpy()[len(prompt) - 1 :]
    assert tokens == expected.argmax(-1)[: len(tokens)].tolist()
    for position, its in zip(expected, logprobs, strict=False):
        for token, value in its.items():
            assert abs(value.logprob - position[token]) < 2e-3


def test_prompts_of_equal_ids_are_told_apart(llm, embeddings):
    """The ids of all of them are zeros."""
    first, second = (embeddings[ids_of(length)][-48:] for length in (64, 90))
    prompts = [{"prompt_embeds": first}, {"prompt_embeds": second}, {"prompt_token_ids": [0] * 48}]
    cold = []
    for one in prompts:
        assert llm.reset_prefix_cache()
        cold += answers(llm, [one])
    assert len({tuple(tokens) for tokens, _ in cold}) == 3
    assert llm.reset_prefix_cache()
    for _ in range(2):
        assert_equal(answers(llm, prompts), cold)
    # They differ behind a common head, which is found.
    mixed = {"prompt_embeds": np.concatenate([first[:32], second[32:]])}
    (output,) = llm.generate(mixed, PARAMS, use_tqdm=False)
    assert output.num_cached_tokens == 32
    assert llm.reset_prefix_cache()
    assert output.outputs[0].token_ids == answers(llm, [mixed])[0][0]


def test_preempted_and_several_answers(llm, embeddings):
    """There are blocks for two of the requests that run."""
    prompts = [embeddings[ids_of(length)] for length in (64, 33, 60, 40)]
    params = PARAMS.clone(max_tokens=60, ignore_eos=True)
    alone = [answers(llm, [{"prompt_embeds": one}], params)[0] for one in prompts]
    assert llm.reset_prefix_cache()
    before = llm.llm_engine.stats().num_preemptions
    assert_equal(answers(llm, [{"prompt_embeds": one} for one in prompts], params), alone)
    assert llm.llm_engine.stats().num_preemptions > before
    drawn = PARAMS.clone(n=3, temperature=1.0, seed=7)
    several = answers(llm, [{"prompt_embeds": prompts[0]}], drawn)
    of_tokens = answers(llm, [{"prompt_token_ids": ids_of(64)}], drawn)
    assert_equal(several, of_tokens)
    llm.sleep(level=1)
    llm.wake_up()
    assert_equal(answers(llm, [{"prompt_embeds": prompts[0]}], drawn), several)


def test_no_token_of_them_counts_as_said(llm, embeddings):
    params = SamplingParams(repetition_penalty=1.5)
    admission = Admission(
        slot=0, sampling_params=params, seed=0, stop_token_ids=[], bad_word_ids=[],
        prompt_token_ids=[NO_TOKEN, 5], output_token_ids=[],
    )  # fmt: skip
    counts = slot_row(admission, 384, 128).token_counts
    assert np.flatnonzero(counts & PROMPT_BIT).tolist() == [5]
    (found,) = answers(llm, [{"prompt_embeds": embeddings[ids_of(33)]}], PARAMS.clone(
        repetition_penalty=1.5, allowed_token_ids=[0, 1], max_tokens=1
    ))  # fmt: skip
    (plain,) = answers(
        llm,
        [{"prompt_embeds": embeddings[ids_of(33)]}],
        PARAMS.clone(allowed_token_ids=[0, 1], max_tokens=1),
    )
    assert found[0] == plain[0]


def test_what_needs_tokens_is_refused(llm, embeddings):
    prompt = {"prompt_embeds": embeddings[:8]}
    with pytest.raises(ValidationError, match="prompt_logprobs=1: a prompt of embeddings"):
        llm.generate(prompt, PARAMS.clone(prompt_logprobs=1), use_tqdm=False)
    with pytest.raises(ValidationError, match="prompt_embeds: a beam search"):
        llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=2))
    with pytest.raises(ValidationError, match="truncate_prompt_tokens"):
        options = {"truncate_prompt_tokens": 8}
        llm.generate(prompt, PARAMS, use_tqdm=False, tokenization_kwargs=options)
    with pytest.raises(ValidationError, match=r"prompts\[1\]: prompt_embeds=.*must be \[tokens"):
        llm.generate([prompt, {"prompt_embeds": embeddings[:, :9]}], PARAMS, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "devices|pipeline_parallel_size=2: it is not supported"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "not supported"),
        ({"runner": "pooling"}, "pools reads tokens alone"),
    ],
)
def test_options_that_do_not_go_together_are_refused(model, options, reason):
    with pytest.raises(ValidationError, match=reason):
        LLM(model, **OPTIONS | options)


def test_inputs_of_layers_are_of_tokens(tmp_path):
    with pytest.raises(UnsupportedModelError, match="enable_prompt_embeds: each layer"):
        LLM(make_tiny_checkpoint(tmp_path, "gemma4"), **OPTIONS | {"max_model_len": 64})


def test_without_the_option_nothing_is_there(model, embeddings):
    from jaxllm.config import EngineConfig
    from jaxllm.plan.make_plan import make_plan
    from jaxllm.programs.declare import WRITE_EMBEDS, declare_programs, make_packer
    from jaxllm.runner.state import DeviceState

    plain, given = (
        make_plan(EngineConfig.create(model, **TINY | {"enable_prompt_embeds": asked}))
        for asked in (False, True)
    )
    assert plain.embeds is None and DeviceState.abstract(plain, plain.stages[0]).given is None
    programs = [declare_programs(plan, make_packer(plan).layouts) for plan in (plain, given)]
    assert programs[1].keys() - programs[0].keys() == {WRITE_EMBEDS}
    sizes = [
        [layout.abstract().shape for layout in make_packer(plan).layouts.values()]
        for plan in (plain, given)
    ]
    assert sizes[0][0] == sizes[1][0] and sizes[0][-1] < sizes[1][-1]  # decodes, mixed steps


def of_family(family):
    return lambda path: make_tiny_checkpoint(path, family)


WAYS = {
    "gemma2": (of_family("gemma2"), {}),  # its embeddings have a scale
    "gpt2": (of_family("gpt2"), {}),
    "qwen3_5": (of_family("qwen3_5"), {}),
    "deepseek_v2": (of_family("deepseek_v2"), {}),
    "on the host": (of_family("llama"), {"num_gpu_blocks_override": 8, "kv_offloading_size": 0.01}),
    "codes": (of_family("llama"), {"quantization": "int8", "kv_cache_dtype": "fp8"}),
    "mistral3": (make_model, {}),
    "qwen3_vl": (make_qwen3, {}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
def test_any_model_takes_them(way, tmp_path):
    """Also beside images, whose embeddings are in the same pool."""
    make, options = WAYS[way]
    llm = LLM(path := make(tmp_path), **OPTIONS | options)
    try:
        found = table(path) * (8.0 if way == "gemma2" else 1.0)  # the root of the hidden size
        given = [{"prompt_embeds": found[ids_of(length)]} for length in LENGTHS]
        expected = answers(llm, [{"prompt_token_ids": ids_of(length)} for length in LENGTHS])
        for one, its in zip(given, expected, strict=True):
            for _ in range(2):
                assert_equal(answers(llm, [one]), [its])
        if (images := llm.llm_engine.info.images) is not None:
            data = {"image": picture(40, 40)}
            given.insert(2, {"prompt": f"a {images.image_token} b", "multi_modal_data": data})
            expected[2:2] = answers(llm, given[2:3])
        assert llm.reset_prefix_cache()
        assert_equal(answers(llm, given), expected)
    finally:
        llm.shutdown()


@pytest.mark.sweep
def test_adapters_take_them(tmp_path, embeddings, model):
    """Beside each other, and never the blocks of another adapter."""
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    llm = LLM(model, **OPTIONS | lora)
    loras = [
        LoRARequest(str(seed), seed, make_tiny_adapter(tmp_path / str(seed), model, seed=seed))
        for seed in (1, 2)
    ]
    which = [None, *loras]
    given = [{"prompt_embeds": embeddings[ids_of(64)]}] * len(which)
    tokens = [{"prompt_token_ids": ids_of(64)}] * len(which)
    try:
        found, expected = [
            [
                (one.outputs[0].token_ids, one.outputs[0].logprobs)
                for one in llm.generate(prompts, PARAMS, lora_request=which, use_tqdm=False)
            ]
            for prompts in (given, tokens)
        ]
        assert_equal(found, expected)
        assert len({tuple(tokens) for tokens, _ in found}) == len(which)
    finally:
        llm.shutdown()


# The devices of a process are counted once, so it is another one.
SCRIPT = """
import json, os, sys
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
os.environ["JAX_PLATFORMS"] = "cpu"

from pathlib import Path
from jaxllm import LLM
from tests.prompt_embeds.models import OPTIONS, table
from tests.prompt_embeds.test_engine import LENGTHS, answers, assert_equal, ids_of

path = Path(sys.argv[1])
found, expected = table(path), None
for sizes in ((1, 1), (2, 1), (2, 2)):
    names = ("tensor_parallel_size", "data_parallel_size")
    llm = LLM(path, **OPTIONS | dict(zip(names, sizes)))
    its = answers(llm, [{"prompt_embeds": found[ids_of(length)]} for length in LENGTHS])
    assert_equal(its, expected or its)
    expected = expected or its
    llm.shutdown()
"""


@pytest.mark.sweep
def test_answers_do_not_depend_on_the_devices(model):
    run = [sys.executable, "-c", SCRIPT, str(model)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
