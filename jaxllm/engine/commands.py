"""Commands: what an engine can do beside answering requests.

A command is data. It defines what it does in one engine core, and how the answers of several cores
become one. `call(command)` sends it from any frontend, through a socket if the engine is in another
process. A new command is a class here and a line in COMMANDS.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, get_type_hints

import msgspec

from jaxllm.engine.sleep import KV_CACHE, WEIGHTS, parts_named, parts_of
from jaxllm.errors import ValidationError, refused
from jaxllm.lora.request import Adapter
from jaxllm.messages import EngineInfo, EngineOutput, FinishReason
from jaxllm.metrics.memory import DeviceMemory, EngineMemory, resident_bytes
from jaxllm.metrics.stats import EngineStats

if TYPE_CHECKING:  # frontends make commands, and must not import the engine's parts
    from jaxllm.executor.base import Executor
    from jaxllm.executor.profiler import Profiler
    from jaxllm.lora.host import Adapters
    from jaxllm.scheduler.scheduler import Scheduler

Part = TypeVar("Part")
Answer = TypeVar("Answer")


class Core(Protocol):
    """What a command may use of an engine core."""

    info: EngineInfo
    scheduler: "Scheduler"
    executor: "Executor"
    profiler: "Profiler"
    is_on_one_host: bool
    asleep: frozenset[str]  # parts that sleep; while there are any, no step is dispatched
    late_outputs: list[EngineOutput]  # the next step returns them
    adapters: "Adapters | None"  # None: the engine has none

    def check(self) -> None:
        """Raise if the engine is dead."""
        ...

    def settle(self) -> None:
        """Wait for the steps in flight; raise if the engine is dead."""
        ...

    def stats(self) -> EngineStats: ...


class Command(msgspec.Struct, Generic[Part, Answer], frozen=True, tag=True):
    """Something to do between two steps. Only the caller gets what `run` raises, so `run` must
    refuse before it changes anything."""

    takes_long: ClassVar[bool] = False  # it moves all weights, or writes much to a disk
    is_for_process: ClassVar[bool] = False  # it runs once, however many cores the process has

    def run(self, core: Core) -> Part:
        """Run the command in one engine core."""
        raise NotImplementedError

    def join(self, answers: list[Part]) -> Answer:
        """Combine the answers of several cores. The result crosses processes as the annotated
        return type."""
        raise NotImplementedError

    def unite(self, answers: list[Answer]) -> Answer:
        """Combine the answers of several engines, none of which knows of the others."""
        raise refused("command", type(self).__name__, "it is for one engine, not for a fleet")


class Order(Command[None, None], frozen=True):
    """A command without an answer."""

    def join(self, answers: list[None]) -> None:
        pass


class GetStats(Command[EngineStats, list[EngineStats]], frozen=True):
    """The figures of each replica as of now."""

    def run(self, core: Core) -> EngineStats:
        return core.stats()

    def join(self, answers: list[EngineStats]) -> list[EngineStats]:
        return answers

    def unite(self, answers: list[list[EngineStats]]) -> list[EngineStats]:
        return [stats for one in answers for stats in one]


class GetMemory(Command[list[DeviceMemory], EngineMemory], frozen=True):
    """The memory use of the process and its devices as of now."""

    def run(self, core: Core) -> list[DeviceMemory]:
        return core.executor.device_memory()

    def join(self, answers: list[list[DeviceMemory]]) -> EngineMemory:
        return EngineMemory(resident_bytes(), answers)

    def unite(self, answers: list[EngineMemory]) -> EngineMemory:
        total = sum(one.resident_bytes for one in answers)
        return EngineMemory(total, [devices for one in answers for devices in one.devices])


class ResetPrefixCache(Command[bool, bool], frozen=True):
    """Forget all cached prompt blocks. The answer is False if some are in use."""

    def run(self, core: Core) -> bool:
        return core.scheduler.reset_prefix_cache()

    def join(self, answers: list[bool]) -> bool:
        return all(answers)


class StartProfile(Order, frozen=True):
    """Begin a profile of the process and its devices, in the engine's `profile_dir`."""

    takes_long = True
    is_for_process = True

    def run(self, core: Core) -> None:
        core.profiler.start()


class StopProfile(Order, frozen=True):
    """End the profile and write it out."""

    takes_long = True
    is_for_process = True

    def run(self, core: Core) -> None:
        core.profiler.stop()


class Sleep(Order, frozen=True):
    """Free memory of the devices, and compute nothing until `WakeUp`. New requests are accepted and
    wait. All cached prefixes are forgotten, except at level 0 and, at level 1, those on the
    host."""

    level: int = 1
    mode: str = "keep"

    takes_long = True

    def run(self, core: Core) -> None:
        parts = parts_of(self.level, self.mode)
        if not core.is_on_one_host:
            raise refused("level", self.level, "an engine on several hosts cannot sleep")
        if self.level == 2 and (core.info.has_block_files or core.info.hand_over is not None):
            kept = "in kv_offloading_path" if core.info.has_block_files else "of other engines"
            raise refused(
                "level",
                self.level,
                f"the weights that are read again may be others than those of the blocks {kept}; "
                "use level 1",
            )
        core.settle()
        if self.mode == "abort":
            core.late_outputs += core.scheduler.end_all(FinishReason.ABORT)
        core.asleep |= parts
        if self.level:
            # Running requests will compute their keys and values again.
            core.scheduler.restart()
            if self.level == 2:
                core.scheduler.reset_prefix_cache()  # on the host: the next weights may be others
            core.executor.sleep(keep_weights=self.level == 1)


class WakeUp(Order, frozen=True):
    """Take memory back: all of it, or the parts that the tags name. When no part sleeps any more,
    the engine goes on."""

    tags: Sequence[str] | None = None

    takes_long = True

    def run(self, core: Core) -> None:
        core.check()
        parts = parts_named(self.tags) & core.asleep
        if WEIGHTS in parts:
            core.executor.wake_weights()
        if KV_CACHE in parts:
            core.executor.wake_cache()
        core.asleep -= parts


class IsSleeping(Command[bool, bool], frozen=True):
    """Whether a part of the engine sleeps."""

    def run(self, core: Core) -> bool:
        return bool(core.asleep)

    def join(self, answers: list[bool]) -> bool:
        return any(answers)


class AddLora(Order, frozen=True):
    """Begin to read an adapter, which a frontend has checked, before a request needs it."""

    adapter: Adapter

    def run(self, core: Core) -> None:
        _adapters(core).keep(self.adapter)


class RemoveLora(Command[bool, bool], frozen=True):
    """Forget the adapters of a number once no request uses them. Whether there were any."""

    number: int

    def run(self, core: Core) -> bool:
        return _adapters(core).remove(self.number)

    def join(self, answers: list[bool]) -> bool:
        return any(answers)


class ListLoras(Command[list[int], list[int]], frozen=True):
    """The numbers of the adapters in the host's memory."""

    def run(self, core: Core) -> list[int]:
        return sorted(_adapters(core).numbers())

    def join(self, answers: list[list[int]]) -> list[int]:
        return sorted({number for answer in answers for number in answer})


class PinLora(Command[bool, bool], frozen=True):
    """Keep the adapters of a number in the host's memory. Whether there are any."""

    number: int

    def run(self, core: Core) -> bool:
        return _adapters(core).pin(self.number)

    def join(self, answers: list[bool]) -> bool:
        return any(answers)


def _adapters(core: Core) -> "Adapters":
    core.check()
    if core.adapters is None:
        raise ValidationError("the engine has no adapters; start it with enable_lora=True")
    return core.adapters


COMMANDS: tuple[type[Command[Any, Any]], ...] = (
    GetStats,
    GetMemory,
    ResetPrefixCache,
    StartProfile,
    StopProfile,
    Sleep,
    WakeUp,
    IsSleeping,
    AddLora,
    RemoveLora,
    ListLoras,
    PinLora,
)


def obey(command: Command[Any, Answer], cores: Sequence[Core]) -> Answer:
    """Run a command in the cores of one process."""
    if type(command) not in COMMANDS:
        raise _unknown(type(command).__name__)
    some = cores[:1] if command.is_for_process else cores
    return command.join([command.run(core) for core in some])


def encode(command: Command[Any, Any]) -> msgspec.Raw:
    """Turn a command into bytes."""
    return msgspec.Raw(msgspec.msgpack.encode(command))


def decode(data: msgspec.Raw) -> Command[Any, Any]:
    """Undo `encode`; raise ValidationError for an unknown command or a field of a wrong type."""
    name = msgspec.msgpack.decode(data, type=_Name).type
    kind = next((one for one in COMMANDS if one.__name__ == name), None)
    if kind is None:
        raise _unknown(name)
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise ValidationError(f"{name}: {error}") from None


def decode_answer(command: Command[Any, Answer], data: msgspec.Raw) -> Answer:
    """Decode the answer to a command."""
    return msgspec.msgpack.decode(data, type=get_type_hints(type(command).join)["return"])


class _Name(msgspec.Struct):
    """The part that all commands share: the name of the class."""

    type: str


def _unknown(name: str) -> ValidationError:
    known = ", ".join(one.__name__ for one in COMMANDS)
    return ValidationError(f"unknown command {name!r:.80}; there are {known}")
