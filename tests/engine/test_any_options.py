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


def serve(rng, engine, requests, how, between_steps=lambda: None):
    """Add requests between steps and give some up. Return the outputs by the index of the request,
    and who was given up."""
    outputs = {}
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
        between_steps()
        if engine.is_sleeping():
            continue
        for output in engine.step():
            outputs[int(output.request_id)] = output
            if output.finished:
                running.discard(int(output.request_id))
    return outputs, given_up


def assert_as_plain(model, requests, outputs, given_up, assert_same):
    ended = sorted(set(outputs) - given_up)
    assert len(ended) + len(given_up) == len(requests)
    expected = answers(LLM(model.name, **model.plain), requests)
    assert_same(
        [outputs[name] for name in ended], [expected[name] for name in ended], tolerance(model)
    )


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(100, 100 + ENGINES))
def test_requests_that_come_and_are_given_up_at_any_time_change_no_answer(
    seed, tmp_path, assert_same
):
    rng = random.Random(seed)
    llm, model, how = draw_engine(rng, tmp_path)
    requests = draw_requests(rng, llm, model, 3 * NUM_REQUESTS)
    outputs, given_up = serve(rng, llm.llm_engine, requests, how)
    assert_as_plain(model, requests, outputs, given_up, assert_same)


class Commands:
    """Gives an engine any command, and wakes it up some steps after it has fallen asleep."""

    def __init__(self, rng, engine, requests):
        self._rng, self._engine = rng, engine
        self._loras = [lora for *_, lora in requests if lora is not None]
        self._steps_asleep = 0

    def __call__(self):
        rng, engine = self._rng, self._engine
        if engine.is_sleeping():
            self._steps_asleep += 1
            if self._steps_asleep > 3 or rng.random() < 0.3:
                if rng.random() < 0.5:
                    engine.wake_up(rng.choice((["weights"], ["kv_cache"], ["scheduling"])))
                else:
                    engine.wake_up()
        elif rng.random() < 0.15:
            self._steps_asleep = 0
            rng.choice((self._forget, self._sleep, self._change_adapters))()

    def _forget(self):
        self._engine.reset_prefix_cache()

    def _sleep(self):
        try:
            self._engine.sleep(level=self._rng.randint(0, 2))
        except ValidationError as error:
            assert error.parameter == "level", error

    def _change_adapters(self):
        if not self._loras:
            return
        lora = self._rng.choice(self._loras)
        change = self._rng.choice(("add", "remove", "pin"))
        try:
            if change == "add":
                self._engine.add_lora(lora)
            else:
                getattr(self._engine, f"{change}_lora")(lora.lora_int_id)
        except ValidationError as error:
            assert "lora" in str(error), error


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(200, 200 + ENGINES))
def test_commands_at_any_time_change_no_answer(seed, tmp_path, assert_same):
    rng = random.Random(seed)
    llm, model, how = draw_engine(rng, tmp_path)
    requests = draw_requests(rng, llm, model, 2 * NUM_REQUESTS)
    commands = Commands(rng, llm.llm_engine, requests)
    outputs, given_up = serve(rng, llm.llm_engine, requests, how, commands)
    assert_as_plain(model, requests, outputs, given_up, assert_same)
