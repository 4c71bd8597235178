"""A device made of numpy, and an engine loop around it, to run the real scheduler.

The fake device keeps, for every position of every block of every cache group, a hash of all tokens
up to there, since real keys and values depend on all of them. Each step asserts that every position
that it attends to holds the history of its own request. So it detects a block that is shared,
reused or freed wrongly in the step that reads it. The next token is a function of the history: with
any preemption, caching, chunking or overlap, the outputs must equal those of an undisturbed run.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from jaxllm.cache_groups import CacheGroup, CacheSizes, Chunk, StateSnapshots, Window
from jaxllm.messages import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    PositionLogprobs,
    RequestStats,
)
from jaxllm.prompt_logprobs.host import PromptLogprobs
from jaxllm.prompt_logprobs.slice import NAME as PROMPT_LOGPROBS
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.kv.host_tier import HostTier
from jaxllm.scheduler.kv.manager import KVCacheManager
from jaxllm.scheduler.lanes import Lanes
from jaxllm.scheduler.policy import fcfs
from jaxllm.scheduler.schedule import (
    CARRIED_TOKEN,
    DRAFT_TOKEN,
    GO_ON,
    NO_TOKEN,
    DraftedResult,
    LogprobArrays,
    Schedule,
    StepResult,
)
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.speculative_config import Speculation
from tests.scheduler.fake_mover import FakeMover

VOCAB_SIZE = 50
NUM_LOGPROBS = 3
POISON = -2


def extend_history(history: int, token: int) -> int:
    return (history * 1_000_003 + token + 1) % (2**61 - 1)


def histories(tokens: list[int]) -> list[int]:
    result, history = [], 1
    for token in tokens:
        history = extend_history(history, token)
        result.append(history)
    return result


def sample(history: int) -> int:
    return (history >> 11) % VOCAB_SIZE


def logprob(history: int, token: int) -> float:
    return -float((history ^ token) % 1024)


def expected_run(request: EngineRequest) -> tuple[list[int], FinishReason, int | None]:
    """The output tokens of a request in an undisturbed run, and how it ends."""
    history = histories(request.prompt_token_ids)[-1]
    tokens: list[int] = []
    while True:
        token = sample(history)
        tokens.append(token)
        history = extend_history(history, token)
        if len(tokens) >= request.sampling_params.min_tokens:
            if token in request.eos_token_ids:
                return tokens, FinishReason.STOP, None
            if token in request.stop_token_ids:
                return tokens, FinishReason.STOP, token
        if len(tokens) == request.max_tokens:
            return tokens, FinishReason.LENGTH, None


class FakeDevice:
    """Runs Schedules in order. It knows of requests only what Schedules contain.

    If the engine speculates, the drafts are the next tokens until one is wrong. `is_right(rng)`
    says whether the next one is right.
    """

    def __init__(
        self,
        *,
        groups: tuple[CacheGroup, ...],
        block_size: int,
        max_num_seqs: int,
        max_blocks: int,
        num_drafts: int = 0,
        num_snapshots: int = 0,
        is_right=lambda rng: rng.random() < 0.7,
    ) -> None:
        # With snapshots there are states: each slot's is the history of its newest token.
        self.states = np.full(max_num_seqs, POISON, np.int64)
        self.snapshots = np.full(num_snapshots, POISON, np.int64)
        self.num_drafts = num_drafts
        self.is_right = is_right
        self.rng = np.random.default_rng(0)
        self.drafts: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.block_size = block_size
        self.groups = groups
        self.kv = [np.full((group.num_blocks, block_size), -1, np.int64) for group in groups]
        self.tables = np.full((len(groups), max_num_seqs, max_blocks), -1, np.int32)
        self.lengths = np.zeros(max_num_seqs, np.int64)
        self.histories: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.last_token = [-1] * max_num_seqs
        self.sampled_in = [-1] * max_num_seqs
        self.is_broken = False
        # Requests with this token are corrupted: they sample nothing, and poison their blocks.
        self.glitch_token: int | None = None
        self.is_corrupted = [False] * max_num_seqs

    def run(self, schedule: Schedule) -> StepResult:
        for admission in schedule.admissions:
            known = admission.prompt_token_ids + admission.output_token_ids
            self.histories[admission.slot] = histories(known)
            self.tables[:, admission.slot] = -1
            self.is_corrupted[admission.slot] = self.glitch_token in known
        groups, slots, indices, blocks = schedule.block_updates.T
        self.tables[groups, slots, indices] = blocks
        assert len(set(schedule.slots.tolist())) == schedule.num_rows
        assert schedule.num_tokens.sum() == schedule.total_tokens
        assert (schedule.num_tokens[: schedule.num_decodes] == 1).all()
        assert (schedule.num_tokens[schedule.num_decodes :] > 1).all()
        assert (np.diff(schedule.num_tokens) >= 0).all()

        starts = np.where(schedule.starts == GO_ON, self.lengths[schedule.slots], schedule.starts)
        context_lens = starts + schedule.num_tokens
        if self.num_drafts:
            assert (context_lens <= schedule.context_lens).all()
        else:
            assert (context_lens == schedule.context_lens).all()
        self.lengths[schedule.slots] = context_lens
        ends = np.cumsum(schedule.num_tokens)
        rows = [
            (int(slot), int(context - n), int(context), schedule.token_ids[end - n : end].tolist())
            for slot, context, n, end in zip(
                schedule.slots, context_lens, schedule.num_tokens, ends, strict=True
            )
        ]
        self.advance_states(schedule, rows)
        if self.is_broken:
            for slot, start, end, _ in rows:
                self.write(slot, start, end, POISON)
            garbage = np.zeros(len(rows), np.int32)
            prompt_logprobs = self.no_logprobs(ends[-1])._asdict()
            slices = {PROMPT_LOGPROBS: prompt_logprobs}
            return StepResult(
                garbage, self.no_logprobs(len(rows)), None, slices, self.no_drafts(len(rows))
            )
        # Every row reads before any row writes, and no row may write what another reads: a kernel
        # promises no order within a step.
        written: list[set[int]] = [set() for _ in self.groups]
        read: list[set[int]] = [set() for _ in self.groups]
        for slot, start, end, _ in rows:
            for index, group in enumerate(self.groups):
                first = first_seen(group.window, start)
                blocks, places = self.address(index, slot, first, start)
                if not self.is_corrupted[slot]:
                    due = self.histories[slot][first:start]
                    where = f"slot {slot}, group {index}"
                    found = self.kv[index][blocks, places].tolist()
                    assert found == due, f"{where}: {found}, not {due}"
                new = set(self.address(index, slot, start, end)[0].tolist())
                assert not new & (written[index] | read[index]), f"blocks of slot {slot}"
                assert not set(blocks.tolist()) & written[index], f"blocks of slot {slot}"
                written[index] |= new
                read[index] |= set(blocks.tolist())
        flat_histories: list[int] = []
        carried = [slot for slot, _, _, tokens in rows if CARRIED_TOKEN in tokens]
        if schedule.carried_from is not None:
            newest = max((self.sampled_in[slot] for slot in carried), default=-1)
            assert schedule.carried_from == newest
        num_drafts = schedule.num_drafts
        for row, (slot, start, end, tokens) in enumerate(rows):
            drafts = 0 if num_drafts is None else int(num_drafts[row])
            newest = tokens[: len(tokens) - drafts]
            assert tokens[len(newest) :] == [DRAFT_TOKEN] * drafts
            if CARRIED_TOKEN in newest:
                assert newest == [CARRIED_TOKEN]
                newest = [self.last_token[slot]]
            drafted = (self.drafts[slot] + [VOCAB_SIZE] * drafts)[:drafts]
            tokens = newest + drafted
            computed = self.histories[slot][start - 1 : start] if start else []
            history = computed[0] if computed else 1
            row_histories = []
            for token in tokens:
                history = extend_history(history, token)
                row_histories.append(history)
            certain = row_histories[: len(newest)]
            due = self.histories[slot][start : end - drafts]
            assert certain == due, f"slot {slot}: wrong tokens"
            self.write(slot, start, end, POISON if self.is_corrupted[slot] else row_histories)
            flat_histories += row_histories
        return self.outputs(schedule, rows, flat_histories)

    def advance_states(self, schedule: Schedule, rows: list) -> None:
        """Load snapshots, check and write the states of the rows, store snapshots."""
        copies = schedule.state_copies
        if copies is not None:
            assert len(self.snapshots), "there are no snapshots"
            self.states[copies.loads[:, 1]] = self.snapshots[copies.loads[:, 0]]
        for slot, start, end, _ in rows:
            is_right = not self.is_corrupted[slot] and not self.is_broken
            if len(self.snapshots) and start and is_right:
                assert self.states[slot] == self.histories[slot][start - 1], f"slot {slot}"
            known = self.histories[slot][:end]
            self.states[slot] = known[-1] if is_right else POISON
        if copies is not None:
            # A snapshot is kept of a row of the step, in a place of its own.
            assert set(copies.stores[:, 0].tolist()) <= set(schedule.slots.tolist())
            assert len(set(copies.stores[:, 1].tolist())) == len(copies.stores)
            self.snapshots[copies.stores[:, 1]] = self.states[copies.stores[:, 0]]

    def outputs(self, schedule: Schedule, rows: list, flat_histories: list[int]) -> StepResult:
        sampled, row_logprobs = [], self.no_logprobs(len(rows))
        drafted = self.no_drafts(len(rows))
        for row, (slot, _, end, _) in enumerate(rows):
            history = self.histories[slot]
            num_drafts = 0 if schedule.num_drafts is None else int(schedule.num_drafts[row])
            assert bool(schedule.samples[row]) == (end - num_drafts == len(history))
            token = 10**6  # meaningless where the row does not sample
            if schedule.samples[row]:
                token = self.sample_one(slot, row_logprobs, row)
                self.sampled_in[slot] = schedule.step
                drafts = self.drafts[slot][:num_drafts]
                accepted = 0
                while accepted < len(drafts) and drafts[accepted] == self.last_token[slot]:
                    place = row * self.num_drafts + accepted
                    newest = self.sample_one(slot, drafted.logprobs, place)
                    drafted.token_ids[row, accepted] = newest
                    accepted += 1
                drafted.num_accepted[row] = accepted
                self.lengths[slot] = end - num_drafts + accepted
                self.drafts[slot] = self.propose(slot)
                drafted.num_proposed[row] = len(self.drafts[slot])
            sampled.append(NO_TOKEN if self.is_corrupted[slot] else token)
        slices = {}
        if PROMPT_LOGPROBS in schedule.slices:
            targets = schedule.slices[PROMPT_LOGPROBS]["targets"]
            prompt_logprobs = self.no_logprobs(schedule.total_tokens)
            slices[PROMPT_LOGPROBS] = prompt_logprobs._asdict()
            for position, target in enumerate(targets.tolist()):
                if target >= 0:
                    prompt_logprobs.token_ids[position, 0] = target
                    value = logprob(flat_histories[position], target)
                    prompt_logprobs.logprobs[position] = value
            for row, (slot, start, end, _) in enumerate(rows):
                if self.is_corrupted[slot]:
                    last = int(schedule.num_tokens[: row + 1].sum())
                    prompt_logprobs.logprobs[last - (end - start) : last] = np.nan
        return StepResult(
            np.array(sampled + [7], np.int32),  # padding rows come back too
            row_logprobs if schedule.wants_logprobs else None,
            slices=slices,
            drafted=drafted if self.num_drafts else None,
        )

    def sample_one(self, slot: int, logprobs: LogprobArrays, place: int) -> int:
        history = self.histories[slot]
        token = sample(history[-1])
        logprobs.token_ids[place, 0] = token
        logprobs.logprobs[place] = logprob(history[-1], token)
        history.append(extend_history(history[-1], token))
        self.last_token[slot] = token
        return token

    def propose(self, slot: int) -> list[int]:
        """Drafts of the next tokens; after a wrong one, any."""
        drafts: list[int] = []
        history = self.histories[slot][-1]
        while len(drafts) < self.num_drafts and self.rng.random() < 0.9:
            token = sample(history) if self.is_right(self.rng) else int(self.rng.integers(50))
            drafts.append(token)
            history = extend_history(history, token)
        return drafts

    def write(self, slot: int, start: int, end: int, values: list[int] | int) -> None:
        for index, kv in enumerate(self.kv):
            kv[self.address(index, slot, start, end)] = values

    def lose_cache(self) -> None:
        for kv in self.kv:
            kv[:] = POISON
        self.lengths[:] = POISON
        self.states[:] = POISON
        self.snapshots[:] = POISON

    def address(self, group: int, slot: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(start, end)
        blocks = self.tables[group, slot, positions // self.block_size]
        assert (blocks >= 0).all(), f"slot {slot} has no block for a position below {end}"
        return blocks, positions % self.block_size

    def no_drafts(self, rows: int) -> DraftedResult | None:
        zeros = np.zeros(rows + 1, np.int32)
        return DraftedResult(
            zeros,
            zeros.copy(),
            np.zeros((rows + 1, self.num_drafts), np.int32),
            self.no_logprobs((rows + 1) * self.num_drafts),
        )

    @staticmethod
    def no_logprobs(positions: int) -> LogprobArrays:
        shape = (positions, 1 + NUM_LOGPROBS)
        return LogprobArrays(
            np.zeros(shape, np.int32),
            np.zeros(shape, np.float32),
            np.ones(positions, np.int32),
            np.zeros(positions, np.float32),
        )


@dataclass
class Received:
    """All outputs of one request."""

    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    stats: list[RequestStats] = field(default_factory=list)
    last: EngineOutput | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.last.finish_reason if self.last else None

    def take(self, output: EngineOutput) -> None:
        assert self.finish_reason is None, f"{output.request_id} goes on after its end"
        self.token_ids += output.new_token_ids
        self.logprobs += output.new_logprobs or []
        self.prompt_logprobs += output.new_prompt_logprobs or []
        if output.stats is not None:
            self.stats.append(output.stats)
        self.last = output

    def verify(self) -> None:
        """Assert that the outputs equal those of an undisturbed run, as far as the request got."""
        assert self.last is not None
        tokens, finish_reason, stop_reason = expected_run(self.request)
        if self.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert self.token_ids == tokens[: len(self.token_ids)]
            return
        assert self.token_ids == tokens, self.request.request_id
        assert (self.finish_reason, self.last.stop_reason) == (finish_reason, stop_reason)
        prompt = self.request.prompt_token_ids
        chain = histories(prompt + tokens)
        params = self.request.sampling_params
        if params.logprobs is not None:
            wanted = [logprob(chain[len(prompt) - 1 + i], t) for i, t in enumerate(tokens)]
            assert [entry.logprobs[0] for entry in self.logprobs] == wanted
        if params.prompt_logprobs is not None:
            wanted = [logprob(chain[i], token) for i, token in enumerate(prompt[1:])]
            assert [entry.token_ids[0] for entry in self.prompt_logprobs] == prompt[1:]
            assert [entry.logprobs[0] for entry in self.prompt_logprobs] == wanted


def first_seen(window: Window, position: int) -> int:
    """The first position that the token at a position sees."""
    if isinstance(window, Chunk):
        return position - position % window.size
    return 0 if window is None else max(0, position - window + 1)


class FakeEngine:
    """Schedules, runs and updates, with `depth` steps dispatched ahead of the one taken in."""

    def __init__(
        self,
        *,
        depth: int = 1,
        num_stages: int = 1,
        lanes: Lanes | None = None,
        num_blocks: int = 16,
        windows: tuple[Window, ...] = (None,),
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 64,
        enable_prefix_caching: bool = True,
        snapshots: StateSnapshots | None = None,
        policy=fcfs,
        failure_loses_cache: bool = False,
        speculation: Speculation | None = None,
        is_right=lambda rng: rng.random() < 0.7,
        num_places: int = 0,
        has_files: bool = False,
        **options,
    ) -> None:
        """With `num_places` the host has places for so many blocks of each cache group."""
        self.depth = depth
        self.failure_loses_cache = failure_loses_cache
        sizes = CacheSizes(
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        groups = sizes.divide(windows, num_blocks)
        self.device = FakeDevice(
            groups=groups,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_blocks=-(-max_model_len // block_size),
            num_drafts=speculation.num_drafts if speculation else 0,
            num_snapshots=snapshots.count if snapshots else 0,
            is_right=is_right,
        )
        # Behind the blocks of the groups, snapshots.
        arrays = [*self.device.kv, *([self.device.snapshots] if snapshots else [])]
        self.mover = FakeMover(arrays, has_files=has_files)
        self.tier = None
        if num_places:
            places = [num_places] * len(arrays)
            self.tier = HostTier(places, self.mover, is_eager=has_files)
        self.kv = KVCacheManager(
            groups=groups,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            tier=self.tier,
            keeps_states=snapshots is not None,
            snapshots=snapshots,
        )
        self.scheduler = Scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            kv=self.kv,
            lanes=lanes or (Lanes(num_stages) if num_stages > 1 else None),
            policy=policy,
            features=(PromptLogprobs(),),
            check_invariants=True,
            speculation=speculation,
            **options,
        )
        self.stats = self.scheduler.stats
        self.in_flight: deque[tuple[Schedule, StepResult, bool]] = deque()
        self.received: dict[str, Received] = {}
        self.done: list[Received] = []

    def add(self, request: EngineRequest) -> Received:
        self.scheduler.add_request(request)
        received = Received(request)
        self.received[request.request_id] = received
        return received

    def abort(self, *request_ids: str) -> None:
        self._take(self.scheduler.abort_requests(list(request_ids)))

    def dispatch(self, *, fails: bool = False) -> Schedule | None:
        schedule = self.scheduler.schedule()
        if schedule is not None:
            # Steps dispatched after a failed step, before its failure is known, are lost too.
            self.device.is_broken |= fails
            if schedule.moves is not None:
                self.mover.send(schedule.moves)
            self.in_flight.append((schedule, self.device.run(schedule), fails))
        return schedule

    def collect(self) -> None:
        schedule, result, fails = self.in_flight.popleft()
        if fails:
            self._take(self.scheduler.fail(schedule, "the step failed"))
            self.device.is_broken = any(failed for _, _, failed in self.in_flight)
            if self.failure_loses_cache:
                for later, _, _ in self.in_flight:
                    self._take(self.scheduler.fail(later, "a step before failed"))
                self.in_flight.clear()
                self.device.lose_cache()
                self.device.is_broken = False
                self.scheduler.restart()
        else:
            self._take(self.scheduler.update(schedule, result))

    def step(self, *, fails: bool = False) -> Schedule | None:
        schedule = self.dispatch(fails=fails)
        if self.in_flight and (schedule is None or len(self.in_flight) > self.depth):
            self.collect()
        return schedule

    def drain(self, max_steps: int = 10_000) -> None:
        """Run until every request has ended, and check that no slot or block is still held."""
        for _ in range(max_steps):
            if not (self.scheduler.has_unfinished_requests() or self.in_flight):
                break
            self.step()
        assert not self.scheduler.has_unfinished_requests(), "not done in time"
        assert not self.received, f"never ended: {list(self.received)}"
        assert self.stats.num_blocks_used == 0
        assert (self.stats.num_requests_running, self.stats.num_requests_waiting) == (0, 0)
        assert self.stats.num_requests_finished == len(self.done)

    def _take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            received = self.received[output.request_id]
            received.take(output)
            if output.finish_reason is not None:
                received.verify()
                self.done.append(self.received.pop(output.request_id))


def new_request(
    request_id: str,
    prompt: list[int] | int,
    max_tokens: int = 4,
    *,
    min_tokens: int = 0,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    **fields,
) -> EngineRequest:
    """Make a request. A number as prompt stands for that many tokens, the same for the same id."""
    if isinstance(prompt, int):
        prompt = np.random.default_rng(list(request_id.encode())).integers(50, size=prompt).tolist()
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        ),
        max_tokens=max_tokens,
        seed=0,
        **fields,
    )


@pytest.fixture(scope="session")
def make_engine():
    return FakeEngine


@pytest.fixture(scope="session")
def make_request():
    return new_request


@pytest.fixture(scope="session")
def undisturbed():
    return expected_run
