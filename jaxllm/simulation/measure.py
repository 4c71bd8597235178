"""Times the steps of a real engine, for simulations of many like it."""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.errors import refused
from jaxllm.executor.base import PendingResult
from jaxllm.executor.uniproc import UniProcExecutor
from jaxllm.messages import EngineRequest
from jaxllm.plan.buckets import Bucket, BucketTable
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.runner.jax_setup import set_up_jax
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.schedule import Schedule, StepResult
from jaxllm.simulation.deployment import MeasuredLine, Measurement
from jaxllm.simulation.step_time import attended_tokens, fit_line

# Decode steps that are timed for each number of rows and each context.
_NUM_DECODES = 8


def measure_steps(
    config: EngineConfig,
    *,
    repetitions: int,
    on_batch: Callable[[str], None] = lambda what: None,
) -> Measurement:
    """Start an engine, and time each of its programs at several contexts.

    Prompts are random tokens. A step is timed from its dispatch, or from the end of the previous
    step if that is later, until its tokens are on the host. So host work counts only if it delays
    the devices. On a CPU, host work takes cores away from the devices.
    """
    for name in ("data_parallel_size", "pipeline_parallel_size", "nnodes"):
        if config.get(name) != 1:
            raise refused(name, config.get(name), "one replica in one stage on one host is timed")
    if config.speculation.read() is not None:
        given = config.speculation.speculative_config or config.speculation.spec_method
        raise refused("speculative_config", given, "steps without drafts are timed; leave it out")
    if (size := config.cache.kv_offloading_size) is not None:
        raise refused(
            "kv_offloading_size", size, "steps between which no blocks move are timed; leave it out"
        )
    set_up_jax(config)
    executor = _TimingExecutor(config)
    plan = executor.plan
    core = EngineCore(config, executor)
    try:
        for name, batch in _batches(plan):
            on_batch(name)
            # The first run is slower, so do not time it.
            _serve(core, batch, plan, seed=name)
            executor.is_timing = True
            for repetition in range(repetitions):
                _serve(core, batch, plan, seed=f"{name}, {repetition}")
            executor.is_timing = False
        stats = core.stats()
        host_s = (stats.schedule_s + stats.update_s) / stats.num_steps
    finally:
        core.shutdown()
    info = plan.info()
    info.model_dir = ""  # it differs between machines
    return Measurement(
        device=plan.chip.name,
        num_chips=-(-plan.num_devices // plan.chip.devices_per_chip),
        info=info,
        host_s_per_step=host_s,
        lines=_lines(plan.buckets, executor.timed),
    )


def _batches(plan: EnginePlan) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Batches of (prompt tokens, answer tokens). They give every program steps with short and with
    long contexts."""
    most = plan.max_model_len - _NUM_DECODES
    for bucket in plan.buckets:
        rows = bucket.num_rows
        if bucket.decode_only:
            fitting = most
            if plan.room_for(most + _NUM_DECODES) < rows:
                blocks = min(group.num_blocks for group in plan.cache_groups)
                fitting = blocks // rows * plan.block_size - _NUM_DECODES
            for length in sorted({16, min(most, fitting) // 3, min(most, fitting)}):
                if length > 0:
                    yield f"{bucket}, contexts of {length}", [(length, _NUM_DECODES)] * rows
        else:
            for num_prompts in sorted({1, max(1, min(rows, bucket.num_tokens // 16))}):
                length = bucket.num_tokens // num_prompts
                if 2 <= length <= most:
                    yield f"{bucket}, {num_prompts} prompts", [(length, 1)] * num_prompts


def _serve(core: EngineCore, batch: list[tuple[int, int]], plan: EnginePlan, *, seed: str) -> None:
    rng, ids = random.Random(seed), range(plan.architecture.vocab_size)
    for index, (num_prompt_tokens, num_output_tokens) in enumerate(batch):
        core.add_request(
            EngineRequest(
                request_id=f"{seed}-{index}",
                prompt_token_ids=rng.choices(ids, k=num_prompt_tokens),
                sampling_params=SamplingParams(temperature=0.0),
                max_tokens=num_output_tokens,
                seed=index,
            )
        )
    while core.has_work():
        core.step()


def _lines(
    buckets: tuple[Bucket, ...], timed: dict[Bucket, list[tuple[int, float]]]
) -> list[MeasuredLine]:
    """A line for each program. A program that no batch reached gets the next larger one's line."""
    lines: list[MeasuredLine] = []
    for bucket in reversed(buckets):
        if timed[bucket]:
            attended, seconds = zip(*timed[bucket], strict=True)
            lines.append(MeasuredLine(bucket, fit_line(attended, seconds), len(seconds)))
        elif lines:
            lines.append(MeasuredLine(bucket, lines[-1].line, 0))
    return lines[::-1]


class _TimingExecutor(UniProcExecutor):
    """Runs steps and records their times."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self.is_timing = False
        self.timed: dict[Bucket, list[tuple[int, float]]] = defaultdict(list)
        self._table = BucketTable(self.plan.buckets)
        self._last_end = 0.0

    def execute(self, schedule: Schedule) -> "_Timed":
        start = time.perf_counter()
        return _Timed(self, schedule, super().execute(schedule), start)

    def note(self, schedule: Schedule, dispatched_at: float) -> None:
        """Record the end of a step."""
        begin, self._last_end = max(dispatched_at, self._last_end), time.perf_counter()
        if self.is_timing:
            bucket = self._table.find(
                num_tokens=schedule.total_tokens,
                num_rows=schedule.num_rows,
                decode_only=schedule.decode_only,
            )
            self.timed[bucket].append((attended_tokens(schedule), self._last_end - begin))


class _Timed:
    def __init__(
        self, executor: _TimingExecutor, schedule: Schedule, pending: PendingResult, start: float
    ):
        self._executor, self._schedule = executor, schedule
        self._pending, self._start = pending, start

    def is_ready(self) -> bool:
        return self._pending.is_ready()

    def result(self) -> StepResult:
        result = self._pending.result()
        self._executor.note(self._schedule, self._start)
        return result
