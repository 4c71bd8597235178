"""An engine that sleeps gives memory back, loses no request, and goes on as if nothing had been."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxllm import LLM, SamplingParams, ValidationError
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY

PROMPTS = ["Once upon a time", [5, 6, 7] * 20, "The answer"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(seed=1, n=2, max_tokens=20),
    SamplingParams(seed=2, max_tokens=16, logprobs=2),
]


@pytest.fixture(scope="module")
def device_bytes():
    """What arrays take on devices, but for those that other tests have left there."""
    gc.collect()
    others = jax.live_arrays()  # held, so that nothing else gets their ids

    def count():
        gc.collect()
        known = set(map(id, others))
        return sum(array.nbytes for array in jax.live_arrays() if id(array) not in known)

    return count


@pytest.fixture(scope="module")
def llm(tmp_path_factory, device_bytes):  # after it
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    return LLM(model, **TINY, check_invariants=True)


def answers(outputs):
    return [[(a.token_ids, a.logprobs, a.finish_reason) for a in one.outputs] for one in outputs]


@pytest.fixture(scope="module")
def expected(llm):
    return answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_it_answers_as_before_and_compiles_nothing(llm, expected, device_bytes, level):
    before, compiled = device_bytes(), llm.llm_engine.stats().num_compiles_after_warmup
    llm.sleep(level)
    assert llm.is_sleeping()
    asleep = device_bytes()
    assert asleep == before if level == 0 else asleep < before // 50, (asleep, before)
    llm.wake_up()
    assert not llm.is_sleeping()
    assert device_bytes() == before
    assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert llm.llm_engine.stats().num_compiles_after_warmup == compiled


@pytest.mark.parametrize("level", [0, 1, 2])
def test_requests_that_are_under_way_wait_and_lose_nothing(llm, expected, level):
    ids = llm.enqueue(PROMPTS, PARAMS)
    for _ in range(8):  # some have tokens, a step is under way
        llm.llm_engine.step()
    llm.sleep(level)
    llm.llm_engine.step()  # says what had come until then
    with pytest.raises(ValidationError, match=r"the engine sleeps.* call wake_up"):
        llm.llm_engine.step()
    ids += llm.enqueue(PROMPTS[:1], PARAMS[:1])  # a new one waits, too
    llm.wake_up()
    found = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in found] == ids
    assert answers(found) == [*expected, expected[0]]


def test_requests_that_are_to_end_have_ended(llm, expected):
    llm.enqueue(PROMPTS, PARAMS)
    for _ in range(8):
        llm.llm_engine.step()
    llm.sleep(mode="abort")
    found = llm.wait_for_completion(use_tqdm=False)
    for output, whole in zip(found, expected, strict=True):
        for one, (token_ids, _, _) in zip(output.outputs, whole, strict=True):
            assert one.finish_reason == "abort"
            assert one.token_ids == token_ids[: len(one.token_ids)] != token_ids
    llm.wake_up()
    assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected


def test_it_wakes_up_in_parts_and_sleeps_deeper(llm, expected, device_bytes):
    whole = device_bytes()
    llm.sleep(1)
    llm.sleep(2)
    llm.sleep(1)  # what was let go is not here to be kept
    llm.wake_up(["weights"])
    assert llm.is_sleeping() and 0 < device_bytes() < whole
    llm.sleep(1)
    llm.wake_up(["kv_cache", "scheduling"])
    assert llm.is_sleeping()
    llm.wake_up(["weights", "weights"])
    assert not llm.is_sleeping()
    llm.wake_up()  # there is nothing left to do
    assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected


def test_cached_prefixes_are_forgotten(llm):
    prompt = {"prompt_token_ids": [9] * 64}
    llm.generate(prompt, PARAMS[0], use_tqdm=False)
    assert llm.generate(prompt, PARAMS[0], use_tqdm=False)[0].num_cached_tokens
    llm.sleep()
    llm.wake_up()
    assert llm.generate(prompt, PARAMS[0], use_tqdm=False)[0].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": 3}, "level=3: 0 pauses"),
        ({"level": True}, "level=True"),
        ({"mode": "wait"}, "mode='wait': use 'keep' or 'abort'"),
    ],
)
def test_how_it_cannot_sleep(llm, arguments, message):
    with pytest.raises(ValidationError, match=message):
        llm.sleep(**arguments)
    assert not llm.is_sleeping()


@pytest.mark.parametrize("tags", ["weights", ["weight"], 1])
def test_what_cannot_wake_up(llm, tags):
    llm.sleep(0)
    with pytest.raises(ValidationError, match="tags="):
        llm.wake_up(tags)
    llm.wake_up()


SCRIPT = """
import json, os, sys
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_PLATFORMS"] = "cpu"
from jaxllm import LLM, SamplingParams

llm = LLM(sys.argv[1], **json.loads(sys.argv[2]),
          tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
params = SamplingParams(temperature=0, max_tokens=12)
def ask():
    outputs = llm.generate(["Once", "upon a time"], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]
expected = ask()
for level in (1, 2):
    llm.sleep(level)
    assert llm.is_sleeping()
    llm.wake_up()
    assert ask() == expected, level
print("the same")
"""


@pytest.mark.slow
def test_every_replica_and_every_stage_sleeps(tmp_path):
    model = make_tiny_checkpoint(tmp_path / "model")
    command = [sys.executable, "-c", SCRIPT, str(model), json.dumps(TINY)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("the same\n")
