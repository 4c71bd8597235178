"""A checkpoint with a damaged embedding: prompts with that token have logits that are NaN."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, SamplingParams
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY

GLITCH = 300
LENGTHS = (5, 40, 9)
HEALTHY = [[3 + (i * 131 + j * j * 7) % 290 for j in range(n)] for i, n in enumerate(LENGTHS)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1),
    SamplingParams(seed=1, max_tokens=30, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(seed=2, top_p=0.9, max_tokens=9, ignore_eos=True, min_tokens=3),
]


@pytest.fixture(scope="module")
def make_llm(tmp_path_factory):
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][GLITCH] = np.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    # So few blocks that what a request leaves is soon another's.
    few = TINY | {"max_model_len": 64, "block_size": 8, "num_gpu_blocks_override": 24}
    return lambda **options: LLM(str(model), **few, check_invariants=True, **options)


def test_it_ends_alone_and_disturbs_nobody(make_llm):
    llm = make_llm()
    expected = [one.outputs[0].token_ids for one in llm.generate(HEALTHY, PARAMS, use_tqdm=False)]
    llm.reset_prefix_cache()
    for _ in range(2):
        prompts = [p for healthy in HEALTHY for p in ([7, *healthy[:20], GLITCH], healthy)]
        params = [p for params in PARAMS for p in (params, params)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for damaged in outputs[::2]:
            [answer] = damaged.outputs
            assert (answer.finish_reason, answer.text, answer.token_ids) == ("error", "", [])
            assert "not finite numbers" in answer.stop_reason
            assert damaged.metrics.is_corrupted
        assert [one.outputs[0].token_ids for one in outputs[1::2]] == expected
        assert not any(one.metrics.is_corrupted for one in outputs[1::2])
    assert llm.llm_engine.stats().num_requests_corrupted == 6
    counted = {m.name: m.value for m in llm.get_metrics() if m.name.endswith("corrupted_requests")}
    assert list(counted.values()) == [6]


def test_who_begins_alike_and_takes_over_its_blocks_is_not_harmed(make_llm):
    llm = make_llm()
    healthy, params = HEALTHY[1], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    expected = llm.generate([healthy], params, use_tqdm=False)[0].outputs[0].token_ids
    llm.reset_prefix_cache()
    # It takes the whole first step, so that the others find its blocks in the next one, when it is
    # not known yet what is in them.
    damaged = [*healthy[:31], GLITCH]
    outputs = llm.generate([damaged, healthy, healthy], params, use_tqdm=False)
    assert [one.outputs[0].finish_reason for one in outputs] == ["error", "length", "length"]
    assert [one.outputs[0].token_ids for one in outputs[1:]] == [expected] * 2
    assert llm.llm_engine.stats().num_requests_corrupted == 1
    assert outputs[1].num_cached_tokens == 24 and outputs[1].metrics.num_preemptions == 1
