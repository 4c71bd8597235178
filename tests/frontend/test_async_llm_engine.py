"""An engine in a process of its own answers as LLM does, many at once, and ends as it should."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxllm import (
    LLM,
    AsyncLLMEngine,
    EngineDeadError,
    LogitsProcessor,
    RequestOutputKind,
    SamplingParams,
    ValidationError,
)
from jaxllm.config import EngineArgs
from jaxllm.engine.commands import Order
from jaxllm.frontend.tokenizer import LONG_TEXT
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY

PROMPTS = ["Once upon a time", "The answer", [5, 6, 7], "a b c d e f g " * 5, {"prompt": "Hi"}]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=2),
    SamplingParams(seed=1, n=3, max_tokens=7),
    SamplingParams(seed=2, max_tokens=9, prompt_logprobs=1),
    SamplingParams(seed=3, max_tokens=20, stop=["e", "a"]),
    SamplingParams(seed=4, max_tokens=5, ignore_eos=True),
]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    return TINY | {"model": str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))}


@pytest.fixture(scope="module")
def expected(options):
    outputs = LLM(**options).generate(PROMPTS, PARAMS, use_tqdm=False)
    return [answers(output) for output in outputs]


def answers(output):
    return [(a.text, a.token_ids, a.finish_reason, a.stop_reason) for a in output.outputs]


def with_engine(options, use):
    """Run `use(engine)` on an event loop."""
    engine = AsyncLLMEngine.from_engine_args(EngineArgs(**options))
    try:
        return asyncio.run(asyncio.wait_for(use(engine), 300))
    finally:
        engine.shutdown()
        assert engine._process.status is not None


@pytest.fixture(scope="module")
def long_options(options):
    """For answers so long that they are under way while a busy machine does other things."""
    return options | {"max_model_len": 2048, "num_gpu_blocks_override": 512}


@pytest.fixture(scope="module")
def on_engine(long_options):
    """Runs `use(engine)` on an engine that tests share and leave without requests."""
    engine = AsyncLLMEngine.from_engine_args(EngineArgs(**long_options))
    with asyncio.Runner() as runner:

        def run(use):
            found = runner.run(asyncio.wait_for(use(engine), 300))
            assert engine.num_unfinished == 0 and not engine.errored
            return found

        yield run
    engine.shutdown()
    assert engine._process.status is not None


async def last(engine, prompt, params, request_id):
    outputs = [output async for output in engine.generate(prompt, params, request_id)]
    assert {output.request_id for output in outputs} == {request_id}
    return outputs[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_answers_are_those_of_llm(kind, on_engine, expected):
    async def use(engine):
        async def one(index):
            parts = []
            params = PARAMS[index].clone(output_kind=kind)
            async for output in engine.generate(PROMPTS[index], params, str(index)):
                parts.append(output)
            assert parts[-1].finished and not any(part.finished for part in parts[:-1])
            total = parts[0]
            for part in parts[1:]:
                total.add(part, aggregate=kind is RequestOutputKind.DELTA)
            total.outputs.sort(key=lambda answer: answer.index)
            return answers(total)

        found = await asyncio.gather(*map(one, range(len(PROMPTS))))
        stats = await engine.stats()
        assert stats.num_requests_running == stats.num_requests_waiting == 0
        assert await engine.reset_prefix_cache()
        assert engine.num_unfinished == 0
        return found

    assert on_engine(use) == expected


@pytest.mark.slow
def test_what_was_processed_before_is_answered_as_well(on_engine, expected):
    async def use(engine):
        with pytest.raises(ValidationError, match="it is empty"):
            engine.process_input("0", [], PARAMS[0])
        processed = [
            engine.process_input(str(index), prompt, params)
            for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
        ]
        assert engine.num_unfinished == 0  # nothing is queued yet
        found = []
        for one in processed:
            outputs = [output async for output in engine.submit(one)]
            outputs[-1].outputs.sort(key=lambda answer: answer.index)
            found.append(answers(outputs[-1]))
        assert engine.num_unfinished == 0
        return found

    assert on_engine(use) == expected


@pytest.mark.slow
def test_short_prompts_do_not_wait_for_long_ones(on_engine):
    async def use(engine):
        go_on = threading.Event()
        before = asyncio.create_task(
            engine.in_tokenizer_thread(lambda: go_on.wait(120), LONG_TEXT + 1)
        )
        params = SamplingParams(max_tokens=2)
        long = asyncio.create_task(last(engine, "a" * (LONG_TEXT + 1), params, "long"))
        await asyncio.sleep(0)  # both are in their thread's queue
        await asyncio.wait_for(last(engine, "Hi", params, "short"), 100)
        assert not before.done() and not long.done()
        go_on.set()
        assert await before
        with pytest.raises(ValidationError, match="max_model_len"):
            await long

    on_engine(use)


@pytest.mark.slow
def test_who_lets_go_of_a_request_aborts_it_and_the_others_go_on(on_engine):
    endless = SamplingParams(max_tokens=2000, ignore_eos=True, seed=1)

    async def use(engine):
        # A task is cancelled, a loop is left, a request is aborted by name.
        cancelled = asyncio.create_task(last(engine, "a", endless, "cancelled"))
        aborted = asyncio.create_task(last(engine, "b", endless, "aborted"))
        stream = engine.generate("c", endless, "left")
        await anext(stream)
        cancelled.cancel()
        await stream.aclose()
        await engine.abort(["aborted", "unknown"])
        assert (await aborted).outputs[0].finish_reason == "abort"
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        other = await last(engine, "d", endless.clone(max_tokens=9), "cancelled")
        assert len(other.outputs[0].token_ids) == 9
        assert await engine.drain(120)
        while (stats := await engine.stats()).num_requests_running:
            await asyncio.sleep(0.05)
        assert stats.num_blocks_used == 0

        # Also while its prompt is being read.
        early = asyncio.create_task(last(engine, "e", endless, "early"))
        await asyncio.sleep(0)
        await engine.abort("early")
        (answer,) = (await early).outputs
        assert (answer.finish_reason, answer.token_ids) == ("abort", [])

        # What the door refuses leaves nothing behind.
        with pytest.raises(ValidationError, match="max_tokens"):
            await last(engine, "a", SamplingParams(max_tokens=-1), "bad")
        with pytest.raises(ValidationError, match="an unfinished request has this id"):
            stream = engine.generate("c", endless, "twice")
            await anext(stream)
            await last(engine, "c", endless, "twice")
        await stream.aclose()
        assert engine.num_unfinished == 0

    on_engine(use)


@pytest.mark.slow
def test_a_slow_consumer_delays_nobody_and_gets_everything(on_engine):
    async def use(engine):
        params = SamplingParams(
            max_tokens=120, ignore_eos=True, seed=1, output_kind=RequestOutputKind.DELTA
        )
        slow = engine.generate("a", params, "slow")
        total = await anext(slow)
        # Meanwhile others come and go.
        for index in range(3):
            await last(engine, "b", params, str(index))
        num_outputs = 1
        async for output in slow:
            total.add(output, aggregate=True)
            num_outputs += 1
        assert len(total.outputs[0].token_ids) == 120
        assert num_outputs < 60  # they have been merged
        whole = await last(
            engine, "a", params.clone(output_kind=RequestOutputKind.FINAL_ONLY), "whole"
        )
        assert answers(total) == answers(whole)

    on_engine(use)


@pytest.mark.slow
def test_a_killed_engine_is_told_to_everybody_who_waits(options):
    async def use(engine):
        endless = SamplingParams(max_tokens=200, ignore_eos=True)
        stream = engine.generate("a", endless, "a")
        await anext(stream)
        os.kill(engine._process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="ended with status -9"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await last(engine, "b", endless, "b")

    with_engine(options, use)


@pytest.mark.slow
def test_a_stopped_engine_is_given_up_and_its_process_ended(options):
    async def use(engine):
        endless = SamplingParams(max_tokens=200, ignore_eos=True)
        stream = engine.generate("a", endless, "a")
        await anext(stream)
        await engine.abort("a")
        await asyncio.sleep(4.5)  # an engine that is idle says so
        stream = engine.generate("b", endless, "b")
        await anext(stream)
        os.kill(engine._process.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="hangs: it has given no sign of life"):
            await anext_until_end(stream)
        assert engine.errored
        assert engine._process.wait(300)

    with_engine(options | {"engine_heartbeat_timeout": 4}, use)


@pytest.mark.slow
def test_a_device_that_never_answers_ends_the_engine(options, tmp_path, monkeypatch, capfd):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "engine")
    monkeypatch.setenv("HANGS_WHILE_EXISTS", str(tmp_path / "hangs"))
    changed = {
        "logits_processors": ["hanging_device:HangingDevice"],
        "engine_iteration_timeout": 4,
        "enforce_eager": False,  # of its steps none compiles
        "max_num_seqs": 1,
    }

    async def use(engine):
        endless = SamplingParams(max_tokens=200, ignore_eos=True)
        stream = engine.generate("a", endless, "a")
        waiting = asyncio.create_task(last(engine, "b", endless, "b"))
        await anext(stream)
        (tmp_path / "hangs").touch()
        for request in (anext_until_end(stream), waiting, engine.sleep()):
            with pytest.raises(EngineDeadError, match="the engine hangs: .* has not got on for"):
                await request
        with pytest.raises(EngineDeadError):
            await engine.check_health()

    with_engine(options | changed, use)
    assert "hanging_device.py" in capfd.readouterr().err  # where each thread was


async def anext_until_end(stream):
    async for _ in stream:
        pass


def test_what_keeps_an_engine_from_starting_is_told_as_llm_tells_it(options):
    for wrong, message in (
        ({"block_size": 64, "num_gpu_blocks_override": 1}, "num_gpu_blocks_override gives 1"),
        ({"tensor_parallel_size": 64}, r"tensor_parallel_size=64, but there (is|are) \d+ device"),
    ):
        with pytest.raises(ValidationError, match=message):
            AsyncLLMEngine(EngineArgs(**options | wrong))


def test_a_class_that_another_process_cannot_import_is_refused(options):
    class Local(LogitsProcessor):
        pass

    with pytest.raises(ValidationError, match="which cannot import it"):
        AsyncLLMEngine(EngineArgs(**options, logits_processors=[Local]))


SCRIPT = """
import asyncio, json, sys
from jaxllm import AsyncLLMEngine, SamplingParams
from jaxllm.config import EngineArgs
engine = AsyncLLMEngine(EngineArgs(**json.loads(sys.argv[1])))
async def answer():
    async for _ in engine.generate([*range(3, 103)], SamplingParams(max_tokens=1), "a"):
        pass
    print(engine._process.pid, flush=True)
    sys.stdin.read()
asyncio.run(answer())
"""
# Python imports this as it starts: a disk that is slower than the engine.
SLOW_DISK = """
import os, time
fsync = os.fsync
os.fsync = lambda file: (time.sleep(0.3), fsync(file))
"""


@pytest.mark.slow
def test_no_engine_outlives_its_parent_but_to_write_its_blocks(options, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    blocks = tmp_path / "blocks"
    options = options | {"kv_offloading_size": 0.002, "kv_offloading_path": str(blocks)}
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(pid, 0)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 300
    while _runs(pid):
        assert time.monotonic() < deadline, "the engine is still there"
        time.sleep(0.1)
    assert len(list(blocks.glob("*.kv"))) == 100 // TINY["block_size"]


def _runs(pid):
    """Whether there is such a process, and not only its name for somebody to collect."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Dance(Order, frozen=True):
    """A command that no engine knows."""


@pytest.mark.slow
def test_calls_beside_requests_are_answered_or_refused_and_harm_no_request(long_options, tmp_path):
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)

    async def use(engine):
        whole = asyncio.create_task(last(engine, "a", params, "0"))
        stream = engine.generate("a", params, "1")
        first = await anext(stream)
        for call, message in (
            (engine.stop_profile(), "no profile is being taken"),
            (engine.sleep(7), "level=7"),
            (engine.sleep("a"), "Sleep: Expected `int`"),
            (engine.wake_up(["eyes"]), "tags='eyes'"),
            (engine.call(Dance()), "unknown command 'Dance'; there are GetStats"),
        ):
            with pytest.raises(ValidationError, match=message):
                await call
        await engine.start_profile()
        await engine.sleep(2)
        assert await engine.is_sleeping()
        late = asyncio.create_task(last(engine, "a", params, "2"))
        while (await engine.stats()).num_requests_waiting < 3:
            await asyncio.sleep(0.01)
        await engine.stop_profile()
        await engine.wake_up()
        assert not await engine.is_sleeping()
        outputs = [await whole, await late]
        tokens = first.outputs[0].token_ids
        async for output in stream:
            tokens = output.outputs[0].token_ids
        assert [output.outputs[0].token_ids for output in outputs] == [tokens] * 2
        assert len(tokens) == 1000
        assert list((tmp_path / "p").rglob("*.xplane.pb"))

        stream = engine.generate("a", params, "3")
        await anext(stream)
        await engine.sleep(mode="abort")
        outputs = [output async for output in stream]
        assert outputs[-1].outputs[0].finish_reason == "abort"

    with_engine(long_options | {"profile_dir": str(tmp_path / "p")}, use)
