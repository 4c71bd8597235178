"""Any options together: an engine refuses them by name, or it answers as a plain one does.

Those of several devices are among them if there are such, as with JAX_NUM_CPU_DEVICES=4.
"""

import random

import pytest

from jaxllm import LLM, SamplingParams, ValidationError
from jaxllm.errors import UnsupportedModelError
from tests.draws import Model

ENGINES = 60
NUM_REQUESTS = 7


def draw_engine(rng, path):
    """An engine of a model, the model, and its options."""
    while True:
        model = Model(rng, path / str(rng.random()))
        how = model.ways(rng)
        try:
            return LLM(model.name, **model.plain | how), model, how
        except (ValidationError, UnsupportedModelError) as error:
            assert any(name in str(error) for name in [*model.plain, *how]), error


def draw_requests(rng, llm, model, count):
    """Requests that the engine takes. It refuses others by the name of a parameter."""
    requests = []
    while len(requests) < count:
        request = model.request(rng, len(requests))
        try:
            prompt, params, lora = request
            llm.llm_engine.add_request("tried", prompt, params, lora_request=lora)
        except ValidationError as error:
            # Only a parameter that was given, and differs from what it is by default.
            name = error.parameter
            assert name is not None and name in str(error), error
            assert getattr(params, name) != getattr(SamplingParams(), name), error
        else:
            llm.llm_engine.abort_request("tried")
            requests.append(request)
    return requests


def answers(llm, requests):
    prompts, params, loras = zip(*requests, strict=True)
    if not any(loras):
        loras = None
    return llm.generate(prompts, params, lora_request=loras, use_tqdm=False)


def tolerance(model):
    # A number that is rounded to 8 bits may go the other way.
    return 1e-3 if model.plain["kv_cache_dtype"] == "auto" else 2e-2


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(ENGINES))
def test_options_are_refused_by_name_or_change_no_answer(seed, tmp_path, assert_same):
    rng = random.Random(seed)
    llm, model, _ = draw_engine(rng, tmp_path)
    requests = draw_requests(rng, llm, model, NUM_REQUESTS)
    first = answers(llm, requests)
    # What is cached now is found, if it is still there, and the requests come in another order.
    if rng.random() < 0.3:
        llm.sleep(level=1)
        llm.wake_up()
    order = rng.sample(range(NUM_REQUESTS), NUM_REQUESTS)
    again = answers(llm, [requests[i] for i in order])

    expected = answers(LLM(model.name, **model.plain), requests)
    assert_same(first, expected, atol=tolerance(model))
    assert_same(again, [expected[i] for i in order], atol=tolerance(model))


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(100, 100 + ENGINES))
def test_requests_that_come_and_are_given_up_at_any_time_change_no_answer(
    seed, tmp_path, assert_same
):
    rng = random.Random(seed)
    llm, model, how = draw_engine(rng, tmp_path)
    requests = draw_requests(rng, llm, model, 3 * NUM_REQUESTS)
    engine, outputs = llm.llm_engine, {}
    coming, running, given_up = list(range(len(requests))), set(), set()
    while coming or engine.has_unfinished_requests():
        for _ in range(rng.choice((0, 0, 1, 3))):
            if coming:
                name = coming.pop()
                prompt, params, lora = requests[name]
                engine.add_request(
                    str(name),
                    prompt,
                    params,
                    lora_request=lora,
                    priority=rng.randint(0, 2) if how["scheduling_policy"] == "priority" else 0,
                )
                running.add(name)
        if running and rng.random() < 0.05:
            name = rng.choice(sorted(running))
            engine.abort_request(str(name))
            running.remove(name)
            given_up.add(name)
        for output in engine.step():
            outputs[int(output.request_id)] = output
            if output.finished:
                running.discard(int(output.request_id))
    ended = sorted(set(outputs) - given_up)
    assert len(ended) + len(given_up) == len(requests)
    expected = answers(LLM(model.name, **model.plain), requests)
    assert_same(
        [outputs[name] for name in ended], [expected[name] for name in ended], tolerance(model)
    )
