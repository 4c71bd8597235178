"""The engine core: schedule → execute → update, over and over.

It runs commands between two steps. It is single-threaded, and never waits for a client.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.engine.commands import Answer, Command, obey
from jaxllm.engine.features import adapters, host_features, structured_output
from jaxllm.engine.in_flight import InFlight
from jaxllm.errors import EngineDeadError, JaxLLMError, ValidationError
from jaxllm.executor.base import Executor
from jaxllm.executor.profiler import Profiler
from jaxllm.logging import init_logger
from jaxllm.messages import EngineInfo, EngineOutput, EngineRequest, FinishReason
from jaxllm.metrics.startup import Phase
from jaxllm.metrics.stats import EngineStats
from jaxllm.scheduler.kv.host_tier import HostTier
from jaxllm.scheduler.kv.manager import KVCacheManager
from jaxllm.scheduler.lanes import Lanes
from jaxllm.scheduler.policy import get_scheduling_policy
from jaxllm.scheduler.scheduler import Scheduler

logger = init_logger(__name__)


class EngineCore:
    """One engine: a scheduler and the executor that runs its steps."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Callable[[], float] = time.perf_counter,
    ):
        policy = get_scheduling_policy(config.scheduler.scheduling_policy)
        self.executor = executor
        self._clock = clock
        self.info: EngineInfo = self.executor.info
        overlap = config.scheduler.async_scheduling
        num_stages = config.parallel.pipeline_parallel_size
        self._stats = EngineStats(overlap=overlap)
        self._structured_output = structured_output(config, self.info)
        self.adapters = adapters(config, self.info, executor)
        self.tier = None
        if self.info.host_places:
            self.tier = HostTier(
                self.info.host_places, executor.mover(), is_eager=self.info.has_block_files
            )
        if not overlap:
            logger.info("async_scheduling is off: the device waits for the host at every step")
        shares_prefixes = config.cache.shares_prefixes(self.info)
        kv = KVCacheManager(
            groups=self.info.cache_groups,
            block_size=self.info.block_size,
            enable_prefix_caching=shares_prefixes,
            keeps_states=self.info.keeps_states,
            tier=self.tier,
            snapshots=self.info.snapshots if shares_prefixes else None,
        )
        self.scheduler = Scheduler(
            max_num_seqs=self.info.max_num_seqs,
            max_num_batched_tokens=self.info.max_num_batched_tokens,
            max_model_len=self.info.max_model_len,
            long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
            enable_chunked_prefill=config.scheduler.enable_chunked_prefill
            and not (self.info.pooling is not None and self.info.pooling.sees_all),
            kv=kv,
            lanes=(
                Lanes(num_stages, max_in_flight=1 if overlap else 0) if num_stages > 1 else None
            ),
            policy=policy,
            features=(*host_features(self.info, kv), self._structured_output),
            gate=self.adapters,
            speculation=self.info.speculation,
            pools=self.info.pooling is not None,
            check_invariants=config.scheduler.check_invariants,
            stats=self._stats,
        )
        self.profiler = Profiler(config.profiler.profile_dir)
        self.in_flight = InFlight(
            executor, self.profiler, self._stats, clock, num_stages=num_stages, overlap=overlap
        )
        # Parts that sleep; no step is dispatched while there are any.
        self.asleep: frozenset[str] = frozenset()
        self.late_outputs: list[EngineOutput] = []  # from commands; the next step returns them
        self.is_on_one_host = config.parallel.nnodes == 1
        # Why the engine is dead; None while it lives.
        self._end: JaxLLMError | None = None

    def add_request(self, request: EngineRequest) -> None:
        """Add a validated request; raise if its id is a duplicate."""
        if self._end is not None:
            raise self._end
        if not self.scheduler.has_unfinished_requests():
            self.in_flight.rest()
        self.scheduler.add_request(request)
        self.in_flight.look_again()

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests without a last output, since the caller no longer waits for them. Unknown
        and finished ids are ignored."""
        self.scheduler.abort_requests(request_ids)
        self.in_flight.look_again()

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        if self.asleep or self.late_outputs:
            return bool(self.late_outputs)
        return bool(self.in_flight) or self.scheduler.has_unfinished_requests()

    def check(self) -> None:
        """Raise if the engine is dead."""
        if self._end is not None:
            raise self._end
        self.executor.check()

    def progress(self) -> list[int | None]:
        """How many steps have ended and blocks have arrived, or None if there is nothing to do; one
        entry per replica, here one. Any thread may call this."""
        num_arrived = 0 if self.tier is None else self.tier.num_arrived
        return [self.in_flight.num_ended + num_arrived if self.has_work() else None]

    @property
    def spare_s(self) -> float:
        """How long the next step may be delayed while the device is still busy. A request that
        arrives meanwhile joins the next step."""
        if self.scheduler.num_running == self.info.max_num_seqs:
            return 0.0  # no other request can join it
        return self.in_flight.spare_s

    @property
    def is_due(self) -> bool:
        """Whether it is time for `step`, and `step` would not wait for the device."""
        if not self.in_flight or self.late_outputs or self.in_flight.is_ready():
            return True
        self.in_flight.note_running()
        return self.in_flight.has_room and self.spare_s <= 0

    def step(self, *, wait: bool = True) -> list[EngineOutput]:
        """Dispatch a step if one can be planned, and return the outputs of earlier steps. Without
        `wait`, the outputs of a step that is still on the device are left to a later call."""
        if self._end is not None:
            raise self._end
        outputs, self.late_outputs = self.late_outputs, []
        if self.asleep:
            return outputs
        start = self._clock()
        if self.in_flight.has_room:
            outputs += self._dispatch_next()
        num_kept = self.in_flight.num_kept  # read before the loop, which changes it
        while len(self.in_flight) > num_kept or self.in_flight.awaits_masks:
            if not wait and not self.in_flight.is_ready():
                break
            outputs += self._collect()
        if self.tier is not None and not self.in_flight and self._end is None:
            self.tier.send()  # perhaps no step follows that would
        self._stats.step_s += self._clock() - start
        return outputs

    def call(self, command: Command[Any, Answer]) -> Answer:
        """Run a command."""
        return obey(command, [self])

    def settle(self) -> None:
        """Wait for the steps in flight. The next step returns their outputs."""
        while self.in_flight:
            self.late_outputs += self._collect()
        if self._end is not None:
            raise self._end
        self.in_flight.rest()

    def stats(self) -> EngineStats:
        """A copy of the figures as of now."""
        running, waiting = ([], []) if self.adapters is None else self.adapters.names()
        return dataclasses.replace(
            self._stats,
            adapters_running=running,
            adapters_waiting=waiting,
            num_token_rows=self.executor.num_token_rows,
            blocks_given=0 if self.tier is None else self.tier.num_given,
            pack_s=self.executor.pack_s,
            num_compiles_after_warmup=self.executor.num_compiles_after_warmup,
            step_sizes=list(self._stats.step_sizes),
            num_accepted_by_place=list(self._stats.num_accepted_by_place),
            expert_tokens=self.scheduler.expert_tokens(self.executor.info.counted_experts),
        )

    @property
    def kv_cache_usage(self) -> float:
        """The share of the KV cache that requests hold now."""
        return self._stats.kv_cache_usage

    @property
    def startup(self) -> list[Phase]:
        """The phases of the engine's start."""
        return self.executor.startup

    def begin_shutdown(self) -> None:
        """Begin what takes long of a shutdown, and return at once. No step follows."""
        self.executor.begin_shutdown()

    def shutdown(self) -> None:
        self._end = ValidationError("the engine has been shut down; make a new one")
        self.in_flight.lose()
        self._structured_output.close()
        try:
            self.profiler.close()
        finally:
            self.executor.shutdown()

    def _dispatch_next(self) -> list[EngineOutput]:
        """Dispatch a step if one can be planned. Return the outputs of requests that have ended
        without running."""
        start = self._clock()
        try:
            schedule = self.scheduler.schedule()
        except EngineDeadError as error:  # planning takes in what other hosts say
            return self._recover(error)
        self.in_flight.expect(schedule)
        self._stats.schedule_s += self._clock() - start
        if schedule is not None:
            self.in_flight.dispatch(start)
            self._sample_late()
        return self.scheduler.take_failed()

    def _sample_late(self) -> None:
        """Let the newest step sample its late rows, if it has not and all tokens before theirs are
        known. It does so before the next step is planned, so that step finds everything as it would
        after any other step."""
        if not self.in_flight.awaits_masks or not self._structured_output.knows_tokens:
            return
        start = self._clock()
        drafts = self.in_flight.late_drafts()
        self._stats.device_wait_s += self._clock() - start
        if not self.in_flight.awaits_masks:
            return  # there are none
        start = self._clock()
        self.in_flight.sample(self._structured_output.masks(drafts))
        self._stats.mask_s += self._clock() - start

    def _collect(self) -> list[EngineOutput]:
        """Take the oldest step, and return its outputs."""
        self._sample_late()  # nothing to do, unless Ctrl-C came before it
        try:
            schedule, result = self.in_flight.take()
        except Exception as error:
            return self._recover(error)
        start = self._clock()
        outputs = self.scheduler.update(schedule, result)
        self._stats.update_s += self._clock() - start
        self._sample_late()
        return outputs

    def _recover(self, error: Exception) -> list[EngineOutput]:
        """Recover from the failure of the oldest step. The requests in it and in later steps end
        with an error. The KV cache is lost, so all other requests start over, unless the engine is
        dead."""
        lost = self.in_flight.lose()
        logger.exception("a step failed; %d steps in flight are lost", len(lost), exc_info=error)
        message = f"{type(error).__name__}: {error}"[:500]
        outputs = [out for schedule in lost for out in self.scheduler.fail(schedule, message)]
        if isinstance(error, EngineDeadError):
            self._end = error
            return outputs + self.scheduler.end_all(FinishReason.ERROR, message)
        self.scheduler.restart()
        self.executor.reset()
        return outputs
