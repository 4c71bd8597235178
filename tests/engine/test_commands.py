"""A command does the same however it reaches an engine, and harms nobody when it fails."""

import queue

import msgspec
import pytest

from jaxllm import SamplingParams, ValidationError
from jaxllm.config import EngineConfig
from jaxllm.engine import commands
from jaxllm.engine.busy_loop import EVERYBODY, BusyLoop, Letter
from jaxllm.engine.commands import (
    COMMANDS,
    AddLora,
    Command,
    GetMemory,
    GetStats,
    IsSleeping,
    ListLoras,
    Order,
    PinLora,
    RemoveLora,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    StopProfile,
    WakeUp,
    decode_answer,
    encode,
)
from jaxllm.engine.core import EngineCore
from jaxllm.engine.replicas import Replicas
from jaxllm.errors import EngineDeadError
from jaxllm.lora.adapter_file import content_of
from jaxllm.lora.request import Adapter
from jaxllm.messages import Call, CallFailed, EngineRequest, FromEngine, Stop, ToEngine
from jaxllm.metrics.memory import DeviceMemory
from tests.adapters import LIMITS, write
from tests.stand_in import StandIn


class Dance(Order, frozen=True):
    """In no list."""

    def run(self, core):
        raise AssertionError("nobody knows it")


class Stumble(Order, frozen=True):
    """Fails."""

    def run(self, core):
        raise RuntimeError("it fell")


class Show(Command[object, object], frozen=True):
    """Has an answer that no process can send."""

    def run(self, core):
        return object()

    def join(self, answers) -> object:
        return answers[0]


class Die(Order, frozen=True):
    """Finds that there is no engine any more."""

    def run(self, core):
        raise EngineDeadError("rank 1 is gone")


@pytest.fixture
def devices():
    return [StandIn(number=number, adapters=LIMITS) for number in range(2)]


@pytest.fixture
def cores(devices, tmp_path):
    config = EngineConfig.create("model", check_invariants=True, profile_dir=str(tmp_path))
    return [EngineCore(config, device) for device in devices]


@pytest.fixture(params=["core", "replicas", "loop"])
def engine(cores, request):
    """An engine of one core, of two, and of two behind a frontend's messages."""
    if request.param == "core":
        return cores[0]
    replicas = Replicas(cores)
    return replicas if request.param == "replicas" else Behind(replicas)


class Behind:
    """An engine as a frontend reaches it: with bytes on both sides of its loop."""

    def __init__(self, engine):
        self.engine = engine

    def call(self, command):
        [message] = self.send(Call(7, encode(command)))
        assert message.number == 7
        if isinstance(message, CallFailed):
            raise ValidationError(f"{message.failure.kind}: {message.failure.reason}")
        return decode_answer(command, message.answer)

    def send(self, *messages):
        inbox, outbox = queue.SimpleQueue(), queue.SimpleQueue()
        for message in [*messages, Stop()]:
            inbox.put(Letter(EVERYBODY, carried(message, ToEngine)))
        BusyLoop(self.engine, inbox, outbox).run()
        sent = [outbox.get().message for _ in range(outbox.qsize())]
        return [carried(message, FromEngine) for message in sent]


def carried(message, kind):
    """A message as it arrives."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


def add(engine, request_id):
    engine.add_request(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=[1, 2, 3],
            sampling_params=SamplingParams(),
            max_tokens=30,
            seed=0,
        )
    )


def drain(engine):
    tokens = {}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def test_each_command_reaches_each_core(engine, cores, devices, tmp_path):
    num_cores = 1 if engine is cores[0] else 2
    done = []

    def call(command):
        done.append(type(command))
        return engine.call(command)

    assert call(IsSleeping()) is False
    assert call(Sleep(2, "keep")) is None
    assert call(IsSleeping()) is True
    assert call(WakeUp(["weights"])) is None
    assert call(IsSleeping()) is True
    assert call(WakeUp()) is None
    assert call(IsSleeping()) is False
    for device in devices[:num_cores]:
        assert device.asked == ["sleep without weights", "wake weights", "wake cache"]
    assert call(ResetPrefixCache()) is True
    assert [stats.num_blocks for stats in call(GetStats())] == [64] * num_cores
    memory = call(GetMemory())
    assert memory.resident_bytes > 1 << 20
    assert memory.devices == [[DeviceMemory(i, 5, 7, 9)] for i in range(num_cores)]
    assert call(StartProfile()) is None
    assert call(StopProfile()) is None
    adapter = Adapter("sql", 3, str(write(tmp_path)), content_of(tmp_path))
    assert call(AddLora(adapter)) is None
    assert call(ListLoras()) == [3]
    assert call(PinLora(3)) is True and call(PinLora(4)) is False
    assert all(core.adapters.numbers() == {3} for core in cores[:num_cores])
    assert call(RemoveLora(3)) is True
    assert set(done) == set(COMMANDS)


def test_all_replicas_must_have_forgotten_and_one_that_sleeps_is_enough(cores):
    replicas = Replicas(cores)
    add(cores[1], "a")
    cores[1].step()
    assert cores[0].call(ResetPrefixCache())
    assert not replicas.call(ResetPrefixCache())
    cores[1].call(Sleep(0))
    assert not cores[0].call(IsSleeping())
    assert replicas.call(IsSleeping())
    assert [stats.num_requests_running for stats in replicas.call(GetStats())] == [0, 1]


def test_a_profile_is_taken_once_for_all_replicas(cores, monkeypatch):
    asked = []
    for number, core in enumerate(cores):
        monkeypatch.setattr(core.profiler, "start", lambda number=number: asked.append(number))
    Replicas(cores).call(StartProfile())
    assert asked == [0]


def test_an_unknown_command_is_refused_by_name(engine):
    with pytest.raises(ValidationError, match="unknown command 'Dance'; there are GetStats, GetM"):
        engine.call(Dance())


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ({"type": "Sleep", "level": "deep"}, "Sleep: Expected `int`, got `str` - at `$.level`"),
        ({"type": "WakeUp", "tags": [1]}, "WakeUp: Expected `str`"),
        ({"level": 1}, "Object missing required field `type`"),
        ([1], "Expected `object`"),
    ],
)
def test_what_cannot_be_read_is_answered(cores, sent, why):
    raw = msgspec.Raw(msgspec.msgpack.encode(sent))
    bad, good = Behind(cores[0]).send(Call(1, raw), Call(2, encode(IsSleeping())))
    assert bad.number == 1 and why in bad.failure.reason
    assert good.number == 2 and decode_answer(IsSleeping(), good.answer) is False


@pytest.mark.parametrize("command", [Stumble(), Show(), Dance(), Sleep(7), WakeUp(["eyes"])])
def test_a_command_that_fails_harms_no_request(cores, command, monkeypatch):
    monkeypatch.setattr(commands, "COMMANDS", (*COMMANDS, Stumble, Show))
    replicas = Replicas(cores)
    for request_id in ("a", "b"):
        add(replicas, request_id)
    assert replicas.step() == []  # the first steps are under way
    with pytest.raises(ValidationError):
        Behind(replicas).call(command)
    assert not replicas.call(IsSleeping())
    tokens = {request_id: len(found) for request_id, found in drain(replicas).items()}
    assert tokens == {"a": 30, "b": 30}


def test_a_device_that_cannot_sleep_costs_no_request(cores, devices, monkeypatch):
    def no_room(*, keep_weights):
        raise MemoryError("no room for the weights")

    add(cores[0], "a")
    cores[0].step()
    monkeypatch.setattr(devices[0], "sleep", no_room)
    with pytest.raises(ValidationError, match="MemoryError: no room for the weights"):
        Behind(cores[0]).call(Sleep())
    cores[0].call(WakeUp())
    assert len(drain(cores[0])["a"]) == 30


def test_an_engine_on_several_hosts_goes_on(cores, devices):
    cores[0].is_on_one_host = False
    with pytest.raises(ValidationError, match="level=1: an engine on several hosts cannot sleep"):
        cores[0].call(Sleep())
    assert not cores[0].call(IsSleeping()) and not devices[0].asked


def test_a_command_that_finds_no_engine_ends_the_loop(cores, monkeypatch):
    monkeypatch.setattr(commands, "COMMANDS", (*COMMANDS, Die))
    with pytest.raises(EngineDeadError, match="rank 1 is gone"):
        Behind(cores[0]).call(Die())
