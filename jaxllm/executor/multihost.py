"""An engine on several hosts: one process on each, all in one distributed JAX.

Rank 0 has the frontend and the schedulers. It sends each Schedule to every rank that has a device
of the replica. All these ranks dispatch the same step, and each gets the tokens. If a replica has
no device on rank 0, its first rank reports its results.

An error in a step or the loss of a rank ends the whole engine (`EngineDeadError`). It never hangs.
"""

import atexit
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import jax

from jaxllm.config import EngineConfig
from jaxllm.errors import EngineDeadError
from jaxllm.executor.base import PendingResult
from jaxllm.executor.follower import EXIT_LOST, follow
from jaxllm.executor.layout import Layout, check_alike, check_same, options_of
from jaxllm.executor.link import LeaderLink
from jaxllm.executor.mover_over_hosts import MoverOverHosts
from jaxllm.executor.reader import Reader, Reading
from jaxllm.executor.shelf_over_hosts import ShelfOverHosts
from jaxllm.executor.wire import (
    AdapterFetched,
    Arrived,
    Build,
    Execute,
    Failed,
    Figures,
    FilesChanged,
    FromLeader,
    Hello,
    Ready,
    Sample,
    StepDone,
    Stop,
    ToLeader,
    decode_to_leader,
    encode,
)
from jaxllm.logging import init_logger
from jaxllm.lora.shelf import Shelf
from jaxllm.messages import EngineInfo
from jaxllm.metrics.memory import DeviceMemory
from jaxllm.metrics.startup import Phase
from jaxllm.offload.mover import write_all
from jaxllm.parallel.distributed import broadcast, join_hosts, own_address
from jaxllm.runner.model_runner import ModelRunner
from jaxllm.scheduler.schedule import LateMasks, Mover, Schedule, StepResult

logger = init_logger(__name__)

# How often rank 0 checks, while it waits, whether the other ranks live.
_LOOK_S = 0.2
# How long rank 0 waits, after a failed step, for another rank's reason.
_GRACE_S = 8.0

_Message = TypeVar("_Message", bound=ToLeader)


def start(
    config: EngineConfig, on_follow: Callable[[], object] = lambda: None
) -> "list[MultiHostExecutor]":
    """Join the other ranks. On rank 0, return an executor for each replica. Any other rank calls
    `on_follow`, runs the steps that rank 0 sends, and ends its process when rank 0 is done."""
    rank = join_hosts(config.parallel)
    if rank:
        on_follow()
        follow(config, rank)
    return _lead(config)


def _lead(config: EngineConfig) -> "list[MultiHostExecutor]":
    others = range(1, jax.process_count())
    link = LeaderLink(own_address(config.parallel), len(others))
    atexit.register(_leave, link)
    try:
        broadcast(link.invitation.encode())
        layout = Layout(config)
        link.await_peers()
        fits = layout.what_fits(0)
        inbox = _Inbox(link)
        options = options_of(config)
        for _ in others:
            hello = inbox.await_message(Hello)
            check_same(options, hello)
            for replica, its in hello.fits.items():
                fits[replica] = its.on_both(fits.get(replica, its))
        link.send(others, encode(Build(fits)))
        plans = {r: layout.plan(r, fits[r]) for r in layout.replicas_of(0)}
        runners = {replica: ModelRunner(plan) for replica, plan in plans.items()}
        infos = {replica: {0: plan.info()} for replica, plan in plans.items()}
        for _ in others:
            ready = inbox.await_message(Ready)
            for replica, info in ready.infos.items():
                infos.setdefault(replica, {})[ready.rank] = info
        for replica, by_rank in infos.items():
            check_alike(replica, by_rank)
    except BaseException as error:
        link.lose(f"rank 0: {type(error).__name__}: {error}"[:500])
        link.close(encode(Stop(link.reason or "")))
        raise
    logger.info("%d replicas on %d ranks", len(layout.ranks), len(others) + 1)
    return [
        MultiHostExecutor(inbox, replica, ranks, infos[replica][ranks[0]], runners.get(replica))
        for replica, ranks in enumerate(layout.ranks)
    ]


def _leave(link: LeaderLink) -> None:
    """Close the link at exit, so that the other ranks write their files while this one does. If a
    rank is lost, end the process then: JAX would wait for the devices, and they for the lost rank.
    """
    reason = link.reason
    link.close(encode(Stop(reason or "")))
    if reason is not None:
        write_all()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_LOST)


class _Inbox:
    """The reports of the other ranks to rank 0. They have the results of the replicas that rank 0
    does not run itself."""

    def __init__(self, link: LeaderLink):
        self.link = link
        self._done: dict[int, deque[StepDone]] = {}  # by replica, the oldest first
        self._arrived: dict[int, list[Arrived]] = {}  # by replica
        self._files: dict[int, list[FilesChanged]] = {}  # by replica
        self._fetched: dict[int, list[AdapterFetched]] = {}  # by replica

    def await_message(self, kind: type[_Message]) -> _Message:
        """Wait for the next message, which must be of this kind."""
        message = None
        while message is None:
            message = self.look(1.0)
        assert isinstance(message, kind), message
        return message

    def look(self, wait_s: float = 0.0) -> ToLeader | None:
        """Take the next message in, or return None after `wait_s`. Raise when a rank is lost."""
        data = self.link.receive(wait_s)
        message = None if data is None else decode_to_leader(data)
        if isinstance(message, Failed):
            self.link.lose(f"rank {message.rank}: {message.reason}")
            self.link.check()
        if isinstance(message, StepDone):
            self._done.setdefault(message.replica, deque()).append(message)
        if isinstance(message, AdapterFetched):
            self._fetched.setdefault(message.replica, []).append(message)
        if isinstance(message, Arrived):
            self._arrived.setdefault(message.replica, []).append(message)
        if isinstance(message, FilesChanged):
            self._files.setdefault(message.replica, []).append(message)
        if isinstance(message, Ready):
            for replica, its in message.files.items():
                files = FilesChanged(message.rank, replica, gained=its, lost=[])
                self._files.setdefault(replica, []).append(files)
        return message

    def take_arrived(self, replica: int, wait_s: float) -> list[Arrived]:
        """Which moves have ended on the other ranks of a replica; wait for that if none have."""
        self.take_in()
        if wait_s and not self._arrived.get(replica):
            self.look(wait_s)
        return self._arrived.pop(replica, [])

    def take_files(self, replica: int) -> list[FilesChanged]:
        """Which files the other ranks of a replica have reported, in order."""
        return self._files.pop(replica, [])

    def take_fetched(self, replica: int, wait_s: float) -> list[AdapterFetched]:
        """Which adapters the other ranks of a replica have read; wait for that if there is none."""
        self.take_in()
        if wait_s and not self._fetched.get(replica):
            self.look(wait_s)
        return self._fetched.pop(replica, [])

    def take_in(self) -> None:
        """Take in all messages that have arrived; raise when a rank is lost."""
        while self.look() is not None:
            pass

    def has_step(self, replica: int) -> bool:
        """Whether `await_step` would return at once."""
        self.take_in()
        return bool(self._done.get(replica))

    def await_step(self, replica: int) -> StepDone:
        """Wait for the oldest result of a replica, and remove it."""
        while not self._done.get(replica):
            self.look(1.0)
        return self._done[replica].popleft()


class MultiHostExecutor:
    """One replica, seen from rank 0."""

    def __init__(
        self,
        inbox: _Inbox,
        replica: int,
        ranks: list[int],
        info: EngineInfo,
        runner: ModelRunner | None,
    ):
        self.info = info
        self._inbox = inbox
        self._link = inbox.link
        self._replica = replica
        self._others = [rank for rank in ranks if rank]
        self._runner = runner
        self._reader = Reader()
        self._figures = Figures()  # of a replica that rank 0 does not run
        # The newest step, if it is still to sample late rows.
        self._late: tuple[_Pending, PendingResult] | None = None
        self._mover: MoverOverHosts | None = None

    @property
    def num_token_rows(self) -> int:
        return (self._runner or self._figures).num_token_rows

    @property
    def pack_s(self) -> float:
        return (self._runner or self._figures).pack_s

    @property
    def num_compiles_after_warmup(self) -> int:
        return (self._runner or self._figures).num_compiles_after_warmup

    @property
    def startup(self) -> list[Phase]:
        return [] if self._runner is None else self._runner.startup

    def device_memory(self) -> list[DeviceMemory]:
        return [] if self._runner is None else self._runner.device_memory()

    def execute(self, schedule: Schedule) -> PendingResult:
        if schedule.moves is not None:
            assert self._mover is not None, "the replica has no places on the host"
            self._mover.expect(schedule.moves)
        # Send first, so that the other ranks pack while this rank packs.
        self._link.send(self._others, encode(Execute(self._replica, schedule)))
        pending = _Pending(self)
        if self._runner is None:
            return pending
        try:
            its = self._runner.execute(schedule)
        except Exception as error:
            raise self._dead(error) from error
        if schedule.late_rows is None:
            pending.reading = self._reader.read(its)
        else:
            self._late = pending, its
        return pending

    def late_drafts(self) -> None:
        return None  # the plan has such drafts on one host only

    def sample(self, masks: LateMasks) -> None:
        self._link.send(self._others, encode(Sample(self._replica, masks)))
        if self._runner is None:
            return
        assert self._late is not None, "no step has late rows"
        (pending, its), self._late = self._late, None
        try:
            self._runner.sample(masks)
        except Exception as error:
            raise self._dead(error) from error
        pending.reading = self._reader.read(its)

    def shelf(self) -> Shelf:
        own = None if self._runner is None else self._runner.shelf()
        return ShelfOverHosts(self.tell, self._inbox, self._replica, len(self._others), own)

    def mover(self) -> Mover:
        if self._mover is None:
            own = None if self._runner is None else self._runner.mover()
            others, replica = self._others, self._replica
            self._mover = MoverOverHosts(self.tell, self._inbox, replica, others, own)
        return self._mover

    def tell(self, message: FromLeader) -> None:
        """Tell the other ranks something beside a step. If one is lost, that is noticed when a step
        is planned or taken."""
        with contextlib.suppress(EngineDeadError):
            self._link.send(self._others, encode(message))

    def check(self) -> None:
        self._inbox.take_in()

    def reset(self) -> None:
        raise AssertionError("an engine on several hosts does not outlive a failed step")

    def sleep(self, *, keep_weights: bool) -> None:
        raise AssertionError("an engine on several hosts does not sleep")

    def wake_weights(self) -> None:
        raise AssertionError("an engine on several hosts does not sleep")

    def wake_cache(self) -> None:
        raise AssertionError("an engine on several hosts does not sleep")

    def begin_shutdown(self) -> None:
        """The other ranks write their files while this one does."""
        if self._runner is not None and self._link.reason is None:
            self._runner.begin_to_end()
        self._link.close(encode(Stop(self._link.reason or "")))

    def shutdown(self) -> None:
        self.begin_shutdown()
        # The thread that copies blocks may wait for a device that waits for a lost rank.
        if self._runner is not None and self._link.reason is None:
            self._runner.free()

    def wait(self, reading: Reading | None) -> StepResult:
        """Wait for a step; raise if another rank is lost meanwhile."""
        if reading is None:
            done = self._inbox.await_step(self._replica)
            self._figures = done.figures
            return done.result
        while not reading.done.wait(_LOOK_S):
            self._inbox.look()
        try:
            return reading.result()
        except Exception as error:
            raise self._dead(error) from error

    def is_done(self, reading: Reading | None) -> bool:
        """Whether `wait` would end at once, with the oldest step or because a rank is lost."""
        try:
            has_result = self._inbox.has_step(self._replica)
        except EngineDeadError:
            return True
        return has_result if reading is None else reading.done.is_set()

    def _dead(self, error: Exception) -> EngineDeadError:
        """Return the error for a step that failed here. If the cause is a lost rank, rank 0 learns
        it soon."""
        until = time.monotonic() + _GRACE_S
        try:
            while (left := until - time.monotonic()) > 0:
                self._inbox.look(left)
        except EngineDeadError as reason:
            return reason
        self._link.lose(f"rank 0: {type(error).__name__}: {error}"[:500])
        return EngineDeadError(self._link.reason)


class _Pending:
    """A step that all ranks of a replica have dispatched."""

    def __init__(self, executor: MultiHostExecutor):
        self._executor = executor
        # None: another rank reads the result, or late rows have not been sampled.
        self.reading: Reading | None = None

    def is_ready(self) -> bool:
        return self._executor.is_done(self.reading)

    def result(self) -> StepResult:
        return self._executor.wait(self.reading)
