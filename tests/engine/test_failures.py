"""What goes wrong while requests run stays with those it touches: failed steps, aborts, Ctrl-C."""

import itertools
import random
import signal

import pytest

from jaxllm import LLM, LogitsProcessor, SamplingParams, ValidationError
from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.errors import EngineDeadError
from jaxllm.executor.uniproc import UniProcExecutor
from jaxllm.messages import EngineRequest, FinishReason
from jaxllm.testing import make_tiny_checkpoint
from tests.stand_in import StandIn


class PressesCtrlC(LogitsProcessor):
    """Changes nothing, and interrupts this process when asked for parameters that often."""

    calls = 0

    def encode(self, params):
        if params.extra_args:
            PressesCtrlC.calls += 1
            if PressesCtrlC.calls == params.extra_args["interrupt_at_call"]:
                signal.raise_signal(signal.SIGINT)
        return None

    def apply(self, logits, params, output_index):
        return logits


class Fault:
    """What the device does wrong, once, in a step counted from the first; and whose prompts that
    step and those dispatched after it computed."""

    def __init__(self, step, where, error):
        self._fails_in = step
        self._where = where  # "execute" or "result"
        self._error = error
        self._num_steps = 0
        self._failing = None  # the step's number in its engine
        self._prompts = {}  # by slot
        self.lost = set()
        self.has_failed = False

    def of(self, executor):
        return StandIn(executor, on_execute=self._on_execute, on_result=self._on_result)

    def _on_execute(self, schedule):
        step, self._num_steps = self._num_steps, self._num_steps + 1
        for admission in schedule.admissions:
            self._prompts[admission.slot] = tuple(admission.prompt_token_ids)
        if step >= self._fails_in and not self.has_failed:
            self.lost |= {self._prompts[slot] for slot in schedule.slots.tolist()}
        if step == self._fails_in:
            self._failing = schedule.step
            self._fail("execute")

    def _on_result(self, schedule):
        if schedule.step == self._failing:
            self._fail("result")

    def _fail(self, where):
        if where == self._where and not self.has_failed:
            self.has_failed = True
            raise self._error


def no_fault():
    return Fault(-1, "", RuntimeError())


PROMPTS = [
    [3 + (i * 131 + j * j * 7 + j) % 380 for j in range(n)] for i, n in enumerate((5, 40, 9))
]
# Shares two blocks with another.
PROMPTS.append(PROMPTS[1][:36] + [7])
# The last token of some is on its way while others go on.
MAX_TOKENS = [4, 12, 9, 6]
OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 10,
    "check_invariants": True,
    "enforce_eager": True,
    "logits_processors": (PressesCtrlC,),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def device(model):
    return UniProcExecutor(EngineConfig.create(model, **OPTIONS))


class AskedOften(EngineCore):
    """Never waits for its device, as replicas do not."""

    def step(self):
        return super().step(wait=False)


@pytest.fixture(params=["overlap", "plain", "overlap, asked often", "plain, asked often"])
def make_core(model, device, request):
    """Make an engine core with an empty cache, on a device that has compiled its programs."""

    def make(fault):
        device.reset()
        config = EngineConfig.create(
            model, **OPTIONS, async_scheduling=request.param.startswith("overlap")
        )
        kind = AskedOften if request.param.endswith("often") else EngineCore
        return kind(config, executor=fault.of(device))

    return make


@pytest.fixture(scope="module")
def expected(model, device):
    """The undisturbed answers by prompt."""
    device.reset()
    core = EngineCore(EngineConfig.create(model, **OPTIONS), executor=no_fault().of(device))
    return {prompt: outcome.token_ids for prompt, outcome in run(core).items()}


class Outcome:
    """What came of a request."""

    def __init__(self):
        self.token_ids = []
        self.ends = []

    @property
    def failed(self):
        [end] = self.ends
        return end.finish_reason is FinishReason.ERROR


def run(core, step=lambda core: core.step()):
    """Let an engine answer all prompts; outcomes by prompt."""
    outcomes = {str(i): Outcome() for i in range(len(PROMPTS))}
    for i, (prompt, max_tokens) in enumerate(zip(PROMPTS, MAX_TOKENS, strict=True)):
        core.add_request(
            EngineRequest(
                request_id=str(i),
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(),
                max_tokens=max_tokens,
                seed=i,
            )
        )
    while core.has_work():
        for out in step(core):
            outcomes[out.request_id].token_ids += out.new_token_ids
            if out.finish_reason is not None:
                outcomes[out.request_id].ends.append(out)
    return {tuple(prompt): outcomes[str(i)] for i, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("where", ["execute", "result"])
@pytest.mark.parametrize("step", [0, 1, 2, 3, 4, 5, 6, 8, 11, 14])
def test_failed_step_ends_its_own_requests_and_no_others(make_core, expected, step, where):
    fault = Fault(step, where, RuntimeError("out of luck"))
    core = make_core(fault)
    outcomes = run(core)
    assert fault.has_failed and fault.lost
    assert {prompt for prompt, outcome in outcomes.items() if outcome.failed} == fault.lost
    for prompt, outcome in outcomes.items():
        if prompt in fault.lost:
            assert outcome.ends[0].error == "RuntimeError: out of luck"
            assert outcome.token_ids == expected[prompt][: len(outcome.token_ids)]
        else:
            assert outcome.ends[0].error is None
            assert outcome.token_ids == expected[prompt]
    assert core.stats().num_blocks_used == 0


@pytest.mark.parametrize("where", ["execute", "result"])
@pytest.mark.parametrize("step", [0, 3, 8])
def test_engine_works_after_a_failure_as_if_there_had_been_none(make_core, expected, step, where):
    core = make_core(Fault(step, where, RuntimeError()))
    run(core)
    # What the failed step should have written is not found in the prefix cache.
    again = run(core)
    assert {prompt: outcome.token_ids for prompt, outcome in again.items()} == expected
    assert core.stats().prefix_cache_hits > 0


@pytest.mark.parametrize("step", [0, 3, 8])
def test_interrupt_while_waiting_for_the_device_loses_nothing(make_core, expected, step):
    def step_on(core):
        try:
            return core.step()
        except KeyboardInterrupt:
            return []

    fault = Fault(step, "result", KeyboardInterrupt())
    core = make_core(fault)
    outcomes = run(core, step_on)
    assert fault.has_failed
    assert {prompt: outcome.token_ids for prompt, outcome in outcomes.items()} == expected


@pytest.mark.parametrize("step", [0, 3, 8])
def test_interrupt_while_a_step_is_dispatched_costs_no_more_than_that_step(
    make_core, expected, step
):
    def step_on(core):
        try:
            return core.step()
        except KeyboardInterrupt:
            return []

    fault = Fault(step, "execute", KeyboardInterrupt())
    core = make_core(fault)
    outcomes = run(core, step_on)
    assert fault.has_failed
    for prompt, outcome in outcomes.items():
        if not outcome.failed:
            assert outcome.token_ids == expected[prompt]
    again = run(core)
    assert {prompt: outcome.token_ids for prompt, outcome in again.items()} == expected


@pytest.mark.parametrize("step", [0, 3, 8])
def test_interrupt_between_planning_and_dispatching_costs_no_more_than_that_step(
    make_core, expected, step
):
    core = make_core(no_fault())
    dispatch, steps = core.in_flight.dispatch, itertools.count()

    def interrupted(begun):
        if next(steps) == step:
            raise KeyboardInterrupt
        return dispatch(begun)

    def step_on(core):
        try:
            return core.step()
        except KeyboardInterrupt:
            return []

    core.in_flight.dispatch = interrupted
    outcomes = run(core, step_on)
    assert any(outcome.failed for outcome in outcomes.values())
    for prompt, outcome in outcomes.items():
        if outcome.failed:
            assert outcome.ends[0].error == "RuntimeError: interrupted"
        else:
            assert outcome.token_ids == expected[prompt]
    again = run(core)
    assert {prompt: outcome.token_ids for prompt, outcome in again.items()} == expected


@pytest.mark.parametrize("where", ["execute", "result"])
def test_an_engine_that_cannot_go_on_ends_every_request_with_the_reason(make_core, expected, where):
    core = make_core(Fault(3, where, EngineDeadError("rank 1 is gone")))
    outcomes = run(core)
    failed = [outcome.ends[0].error for outcome in outcomes.values() if outcome.failed]
    assert failed and set(failed) == {"EngineDeadError: rank 1 is gone"}
    for prompt, outcome in outcomes.items():
        if not outcome.failed:
            assert outcome.token_ids == expected[prompt]
    assert not core.has_work()
    for call in (core.step, core.check):
        with pytest.raises(EngineDeadError, match="rank 1 is gone"):
            call()


def test_a_loss_that_planning_notices_ends_every_request(make_core, expected, monkeypatch):
    """While a step is planned, the engine takes in what other hosts say."""
    core = make_core(no_fault())
    plan, calls = core.scheduler.schedule, []

    def schedule():
        calls.append(plan)
        if len(calls) == 4:
            raise EngineDeadError("rank 1 is gone")
        return plan()

    monkeypatch.setattr(core.scheduler, "schedule", schedule)
    outcomes = run(core)
    failed = [outcome.ends[0].error for outcome in outcomes.values() if outcome.failed]
    assert failed and set(failed) == {"EngineDeadError: rank 1 is gone"}
    for prompt, outcome in outcomes.items():
        if not outcome.failed:
            assert outcome.token_ids == expected[prompt]
    assert not core.has_work()
    with pytest.raises(EngineDeadError, match="rank 1 is gone"):
        core.step()


# ---- the same from outside


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, **OPTIONS)


PARAMS = [SamplingParams(max_tokens=n, seed=i, ignore_eos=True) for i, n in enumerate(MAX_TOKENS)]


def answers(llm, **kwargs):
    outputs = llm.generate(PROMPTS, PARAMS, **{"use_tqdm": False, **kwargs})
    return {tuple(out.prompt_token_ids): out.outputs[0].token_ids for out in outputs}


def assert_idle(llm):
    engine = llm.llm_engine
    assert not engine.has_unfinished_requests()
    assert engine.get_num_unfinished_requests() == 0
    stats = engine.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
    assert stats.num_blocks_used == 0


@pytest.mark.parametrize("seed", range(8))
def test_aborts_at_any_moment_disturb_nobody_else(llm, expected, seed):
    rng = random.Random(seed)
    engine = llm.llm_engine
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(f"{i}", prompt, params)
        # Two at once, so that blocks change hands.
        engine.add_request(f"again {i}", prompt, params)
    finished, aborted = {}, set()
    while engine.has_unfinished_requests():
        if rng.random() < 0.2:
            victims = rng.sample(["0", "1", "2", "3"], 2)
            engine.abort_request(victims)
            engine.abort_request(victims[0])
            aborted |= set(victims) - finished.keys()
        engine.abort_request("unknown")
        for output in engine.step():
            assert output.request_id not in aborted
            if output.finished:
                assert output.request_id not in finished
                finished[output.request_id] = output
    assert aborted and aborted | finished.keys() == {
        name for i in range(4) for name in (f"{i}", f"again {i}")
    }
    for output in finished.values():
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].token_ids == expected[tuple(output.prompt_token_ids)]
    assert_idle(llm)


def test_id_of_an_aborted_request_is_free_at_once(llm, expected):
    engine = llm.llm_engine
    engine.add_request("same", PROMPTS[0], PARAMS[0])
    engine.step()
    engine.step()
    engine.abort_request("same")
    engine.add_request("same", PROMPTS[1], PARAMS[1])
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].token_ids == expected[tuple(PROMPTS[1])]
    assert sum(output.finished for output in outputs) == 1


def test_all_n_answers_are_aborted_together(llm):
    engine = llm.llm_engine
    engine.add_request("many", PROMPTS[0], SamplingParams(n=4, max_tokens=50, ignore_eos=True))
    for _ in range(5):
        engine.step()
    engine.abort_request("many")
    while engine.has_unfinished_requests():
        assert engine.step() == []
    assert_idle(llm)


class InterruptedBar:
    """A progress bar at whose first movement Ctrl-C is pressed."""

    format_dict = {"elapsed": 1.0}

    def __init__(self, **_):
        self.is_closed = False

    def set_postfix_str(self, text, refresh):
        pass

    def update(self, count):
        raise KeyboardInterrupt

    def close(self):
        self.is_closed = True


def test_interrupt_leaves_the_engine_usable(llm, expected):
    bar = InterruptedBar()
    waiting = llm.enqueue(PROMPTS[:1], PARAMS[0])
    with pytest.raises(KeyboardInterrupt):
        answers(llm, use_tqdm=lambda **_: bar)
    assert bar.is_closed
    # Only what was interrupted is gone.
    [output] = llm.wait_for_completion(use_tqdm=False)
    assert output.request_id == waiting[0]
    assert output.outputs[0].token_ids == expected[tuple(PROMPTS[0])]
    assert answers(llm) == expected
    assert_idle(llm)


@pytest.fixture
def python_handler():
    """Python's own handler of Ctrl-C, also where the tests were started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_handler")
@pytest.mark.parametrize("call", [1, 2], ids=["at the door", "within a step"])
def test_ctrl_c_within_a_step_leaves_the_engine_usable(llm, expected, call):
    PressesCtrlC.calls = 0
    params = SamplingParams(max_tokens=50, extra_args={"interrupt_at_call": call})
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPTS[2]], params, use_tqdm=False)
    assert PressesCtrlC.calls == call
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert answers(llm) == expected
    assert_idle(llm)


@pytest.mark.usefixtures("python_handler")
def test_ctrl_c_in_a_step_by_hand_comes_after_it_and_loses_nothing(llm, expected):
    PressesCtrlC.calls = 0
    engine = llm.llm_engine
    engine.add_request("short", PROMPTS[0], PARAMS[0].clone(max_tokens=1))
    outputs = engine.step()
    params = PARAMS[2].clone(extra_args={"interrupt_at_call": 2})
    engine.add_request("interrupted", PROMPTS[2], params)
    # This step brings the short one's token.
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert outputs == [] and engine.get_num_unfinished_requests() == 1
    while engine.has_unfinished_requests():
        outputs += engine.step()
    answers = {out.request_id: out.outputs[0].token_ids for out in outputs if out.finished}
    assert answers == {
        "short": expected[tuple(PROMPTS[0])][:1],
        "interrupted": expected[tuple(PROMPTS[2])],
    }
    assert_idle(llm)


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_aborted_request_is_waited_for_and_the_others_with_it(llm, expected, num_steps):
    ids = llm.enqueue(PROMPTS, PARAMS)
    for _ in range(num_steps):
        llm.llm_engine.step()
    llm.llm_engine.abort_request([ids[1], ids[3]])
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    for output in outputs:
        [answer], tokens = output.outputs, expected[tuple(output.prompt_token_ids)]
        is_aborted = output.request_id in (ids[1], ids[3])
        assert output.finished
        assert answer.finish_reason == ("abort" if is_aborted else "length")
        assert answer.token_ids == (tokens[: len(answer.token_ids)] if is_aborted else tokens)
    assert_idle(llm)


def test_answers_that_came_in_steps_by_hand_are_waited_for(llm, expected):
    ids = llm.enqueue(PROMPTS, PARAMS)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [out.outputs[0].token_ids for out in outputs] == [expected[tuple(p)] for p in PROMPTS]


def test_ids_of_llm_keep_clear_of_those_of_its_engine(llm, expected):
    [last] = llm.enqueue(PROMPTS[:1], PARAMS[0])
    llm.wait_for_completion(use_tqdm=False)
    llm.llm_engine.add_request(str(int(last) + 1), PROMPTS[2], PARAMS[2])
    assert answers(llm) == expected
    assert_idle(llm)


def test_step_after_shutdown_says_so(model):
    llm = LLM(model, **OPTIONS)
    llm.enqueue(PROMPTS[:1], PARAMS[0])
    llm.llm_engine.step()
    llm.shutdown()
    with pytest.raises(ValidationError, match="shut down"):
        llm.llm_engine.step()
    with pytest.raises(ValidationError, match="shut down"):
        llm.wait_for_completion(use_tqdm=False)
