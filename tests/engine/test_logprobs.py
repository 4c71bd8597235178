"""A row gets the logprobs that it asks for, whatever others ask for, and nobody gets more."""

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.executor.uniproc import UniProcExecutor
from jaxllm.messages import EngineRequest
from jaxllm.sampling_params import MAX_STEP_LOGPROBS
from jaxllm.testing import VOCAB_SIZE, make_tiny_checkpoint
from tests.profile import TINY
from tests.stand_in import StandIn

PROMPTS = [[3 + (i * 131 + j * j * 7 + j) % 380 for j in range(10 + i)] for i in range(4)]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    return TINY | {"model": str(model), "max_logprobs": -1, "check_invariants": True}


@pytest.fixture(scope="module")
def llm(options):
    return LLM(**options)


def entries(position):
    return [(token, entry.logprob, entry.rank) for token, entry in position.items()]


@pytest.mark.parametrize("temperature", [0, 1])
def test_logprobs_are_the_same_to_the_bit_whatever_is_asked_for(llm, temperature):
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=6, ignore_eos=True)
    asked = {}
    for mine in (0, 1, 5, 20, 21, -1):
        for others in (None, 1, 20, -1):
            its = [params.clone(logprobs=mine)] + [params.clone(logprobs=others)] * 3
            first = llm.generate(PROMPTS, its, use_tqdm=False)[0].outputs[0]
            asked.setdefault(mine, []).append([entries(one) for one in first.logprobs])
    for same in asked.values():
        assert all(one == same[0] for one in same)
    for place, most in enumerate(asked[-1][0]):
        assert len(most) == VOCAB_SIZE
        for count in (0, 1, 5, 20, 21):
            found = asked[count][0][place]
            assert count <= len(found) <= count + 1
            assert found == most[: len(found)]


@pytest.fixture(scope="module")
def brought(options):
    """What steps bring for requests that ask for so many logprobs."""
    config = EngineConfig.create(**options)
    executor = UniProcExecutor(config)

    def run(*counts):
        executor.reset()
        watched = StandIn(executor)
        core = EngineCore(config, watched)
        for i, count in enumerate(counts):
            core.add_request(
                EngineRequest(
                    request_id=str(i),
                    prompt_token_ids=PROMPTS[i],
                    sampling_params=SamplingParams(temperature=0, logprobs=count),
                    max_tokens=3,
                    seed=0,
                )
            )
        while core.has_work():
            core.step()
        return watched.results

    return run


@pytest.mark.parametrize(
    ("counts", "computed"),
    [((None, None), 0), ((0, None), 1), ((None, 1), 1), ((1, 2), 20), ((20, 0), 20)],
)
def test_a_step_computes_and_brings_what_its_rows_want(brought, counts, computed):
    for result in brought(*counts):
        assert result.logits is None
        assert (result.logprobs is None) == (computed == 0)
        if result.logprobs is not None:
            columns = result.logprobs.token_ids[:2]
            assert columns.shape[1] == 1 + MAX_STEP_LOGPROBS
            assert np.count_nonzero(columns.any(axis=0)) == 1 + computed


def test_logits_come_for_those_who_want_more_than_a_step_computes(brought):
    for result in brought(None, MAX_STEP_LOGPROBS + 1):
        assert result.logits.shape[1] == VOCAB_SIZE
        # The others of the row are made of them.
        assert not result.logprobs.token_ids[:, 2:].any()


def test_all_logprobs_of_a_prompt_survive_a_preemption(options, llm):
    params = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=MAX_STEP_LOGPROBS + 1
    )
    expected = llm.generate(PROMPTS, params, use_tqdm=False)
    small = LLM(**options | {"num_gpu_blocks_override": 10, "enable_prefix_caching": False})
    outputs = small.generate(PROMPTS, params, use_tqdm=False)
    assert small.llm_engine.stats().num_preemptions > 0
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
        for one, other in zip(output.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
            assert one.keys() == other.keys()
            for token, entry in one.items():
                assert entry.logprob == pytest.approx(other[token].logprob, abs=1e-5)
