"""A rank other than 0: runs the steps that rank 0 sends, in that order, and ends with rank 0."""

import functools
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from jaxllm.config import EngineConfig
from jaxllm.executor.base import PendingResult
from jaxllm.executor.layout import Layout, options_of
from jaxllm.executor.link import Invitation, PeerLink
from jaxllm.executor.mover_over_hosts import files_report_of, report_of
from jaxllm.executor.reader import Reader, Reading
from jaxllm.executor.wire import (
    AdapterFetched,
    Build,
    Failed,
    FetchAdapter,
    Figures,
    Fits,
    ForgetAdapter,
    ForgetBlock,
    ForgetBlocks,
    Hello,
    Move,
    Ready,
    Sample,
    StepDone,
    Stop,
    decode_from_leader,
    encode,
)
from jaxllm.logging import init_logger
from jaxllm.lora.shelf import Fetched
from jaxllm.parallel.distributed import broadcast
from jaxllm.runner.model_runner import ModelRunner
from jaxllm.scheduler.schedule import Arrival, BlockKey

logger = init_logger(__name__)

EXIT_LOST = 1


def follow(config: EngineConfig, rank: int) -> NoReturn:
    """Serve rank 0 until it stops, then end the process."""
    invitation = Invitation.decode(broadcast(None))
    link = PeerLink(invitation, rank, on_loss=_end_now)
    _leave_ends_to_rank_0()
    try:
        follower = _Follower(config, link, rank)
        reason = follower.run()
    except BaseException as error:
        logger.error("rank %d: %s", rank, error, exc_info=error)
        link.send(encode(Failed(rank, _text(error))))
        link.close()
        _end_now("it cannot go on without this rank")
    if reason:
        _end_now(reason)
    link.close()  # its beats are of no use while files are written
    follower.close()
    logger.info("rank 0 is done")
    sys.exit(0)


class _Follower:
    def __init__(self, config: EngineConfig, link: PeerLink, rank: int):
        self._config = config
        self._link = link
        self._rank = rank
        self._runners: dict[int, ModelRunner] = {}
        self._readers: dict[int, Reader] = {}
        self._late: dict[int, PendingResult] = {}  # by replica: the step that awaits its masks

    def run(self) -> str:
        """Serve rank 0 until it sends Stop; return its reason, which is empty at a normal end."""
        layout = Layout(self._config)
        fits = layout.what_fits(self._rank)
        self._link.send(encode(Hello(self._rank, options_of(self._config), fits)))
        while True:
            message = decode_from_leader(self._link.receive())
            if isinstance(message, Stop):
                return message.reason
            if isinstance(message, Build):
                self._build(layout, message.fits)
            elif isinstance(message, Sample):
                self._runners[message.replica].sample(message.masks)
                self._readers[message.replica].read(self._late.pop(message.replica))
            elif isinstance(message, Move):
                self._runners[message.replica].mover().send(message.moves)
            elif isinstance(message, ForgetBlock):
                self._runners[message.replica].mover().forget(message.group, message.content)
            elif isinstance(message, ForgetBlocks):
                # Need not wait: the thread that removes the files is the one that reads them.
                self._runners[message.replica].mover().begin_to_forget_all()
            elif isinstance(message, FetchAdapter):
                self._runners[message.replica].shelf().fetch(message.adapter)
            elif isinstance(message, ForgetAdapter):
                self._runners[message.replica].shelf().forget(message.content)
            else:
                pending = self._runners[message.replica].execute(message.schedule)
                if message.schedule.late_rows is None:
                    self._readers[message.replica].read(pending)
                else:
                    self._late[message.replica] = pending

    def close(self) -> None:
        """Write the files of blocks that have none yet, or a while, and read no more adapters."""
        for runner in self._runners.values():
            runner.begin_to_end()
        for runner in self._runners.values():
            runner.end_threads()

    def _build(self, layout: Layout, fits: dict[int, Fits]) -> None:
        infos, files = {}, {}
        for replica in layout.replicas_of(self._rank):
            plan = layout.plan(replica, fits[replica])
            self._runners[replica] = ModelRunner(plan)
            is_first = layout.ranks[replica][0] == self._rank
            report = functools.partial(self._report, replica, is_first)
            self._readers[replica] = Reader(report)
            if plan.offload is not None:
                mover = self._runners[replica].mover()
                mover.follow(functools.partial(self._report_arrivals, replica))
                files[replica] = mover.follow_files(functools.partial(self._report_files, replica))
            if plan.adapters is not None:
                report_fetched = functools.partial(self._report_fetched, replica)
                self._runners[replica].shelf().follow(report_fetched)
            infos[replica] = plan.info()
        self._link.send(encode(Ready(self._rank, infos, files)))

    def _report(self, replica: int, is_first: bool, reading: Reading) -> None:
        """Report a failed step to rank 0. Report a result only from the replica's first rank, and
        so only if rank 0 does not run the replica."""
        try:
            result = reading.result()
        except Exception as error:
            self._link.send(encode(Failed(self._rank, _text(error))))
            return
        if is_first:
            runner = self._runners[replica]
            figures = Figures(
                num_token_rows=runner.num_token_rows,
                pack_s=runner.pack_s,
                num_compiles_after_warmup=runner.num_compiles_after_warmup,
            )
            self._link.send(encode(StepDone(replica, result, figures)))

    def _report_arrivals(self, replica: int, arrivals: list[Arrival]) -> None:
        if (report := report_of(self._rank, replica, arrivals)) is not None:
            self._link.send(encode(report))

    def _report_files(self, replica: int, changes: dict[BlockKey, bool]) -> None:
        self._link.send(encode(files_report_of(self._rank, replica, changes)))

    def _report_fetched(self, replica: int, fetched: Fetched) -> None:
        self._link.send(encode(AdapterFetched(self._rank, replica, fetched)))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _end_now(reason: str) -> NoReturn:
    """End the process from any thread: the main thread may wait for a lost device for ever."""
    logger.error("this rank ends: %s", reason)
    sys.stderr.flush()
    os._exit(EXIT_LOST)


def _leave_ends_to_rank_0() -> None:
    """Ignore SIGTERM: when a whole pod gets it, rank 0 decides when to end, and needs this rank
    until then."""

    def on_terminate(number: int, frame: FrameType | None) -> None:
        logger.info("rank 0 says when this one ends")

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_terminate)
