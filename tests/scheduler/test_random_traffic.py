"""The scheduler under random traffic: every step checks all invariants, the fake device checks
the content of every block, and every request must bring what it would have brought alone."""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxllm.cache_groups import Chunk, StateSnapshots
from jaxllm.messages import FinishReason
from jaxllm.scheduler.policy import priority
from jaxllm.scheduler.request import RequestStatus

MAX_MODEL_LEN = 48
BASE_PROMPT = list(range(40))


class Traffic:
    """Random requests: shared heads, all kinds of ends, groups of siblings."""

    def __init__(self, make_request, rng):
        self.make_request = make_request
        self.rng = rng
        self.ids = itertools.count()

    def requests(self):
        rng = self.rng
        head = BASE_PROMPT[: rng.integers(0, 30)]
        prompt = head + rng.integers(50, size=rng.integers(1, 12)).tolist()
        max_tokens = int(rng.integers(1, MAX_MODEL_LEN - len(prompt) + 1))
        fields = {
            "min_tokens": int(rng.integers(0, max_tokens + 1)) if rng.random() < 0.2 else 0,
            "eos_token_ids": rng.integers(50, size=1).tolist(),
            "stop_token_ids": rng.integers(50, size=rng.integers(0, 4)).tolist(),
            "priority": int(rng.integers(-2, 3)),
            "arrival_time": float(rng.random()),
            "cache_salt": rng.choice([None, None, "salt"]),
            "logprobs": rng.choice([None, None, None, 1]),
            "prompt_logprobs": rng.choice([None, None, None, 1]),
        }
        leader_id = None
        for _ in range(1 if rng.random() < 0.8 else rng.integers(2, 6)):
            request_id = str(next(self.ids))
            yield self.make_request(
                request_id, prompt, max_tokens, prefix_leader_id=leader_id, **fields
            )
            leader_id = leader_id or request_id


# Windows of the cache groups, and blocks of the first.
WINDOWS = {
    "everything": ((None,), 20),
    "windows": ((None, 11, 5), 20),
    "one window": ((9,), 12),
    "chunks": ((None, Chunk(10), 5), 17),
}


# How far the host runs ahead, and stages.
RUNS = {
    "plain": (0, 1),
    "overlapped": (1, 1),
    "plain pipeline": (1, 2),
    "overlapped pipeline": (4, 4),
}
GROUPS = [
    ("fcfs", "everything"),
    ("priority", "everything"),
    ("fcfs", "windows"),
    ("priority", "one window"),
    ("fcfs", "chunks"),
]
# Few, so that they give way all the time.
SNAPSHOTS = StateSnapshots(count=4, stride=8)


def kinds_of_traffic():
    """All mixes of options. A quarter of them has each pair of options; the others are a sweep."""
    options = itertools.product(enumerate(RUNS), (0, 1), (0, 1), enumerate(GROUPS))
    for (run, name), chunked, caching, (group, (policy, windows)) in options:
        is_spared = (run + chunked + 2 * caching + group) % 4
        yield pytest.param(
            *RUNS[name], bool(chunked), bool(caching), policy, windows,
            marks=[pytest.mark.sweep] if is_spared else [],
            id="-".join([
                name, "chunked" if chunked else "whole", "cached" if caching else "uncached",
                policy, windows,
            ]),
        )  # fmt: skip


def numbers_of_requests(few: int, many: int):
    return pytest.mark.parametrize(
        "num_requests", [few, pytest.param(many, marks=pytest.mark.sweep)]
    )


@numbers_of_requests(120, 300)
@pytest.mark.parametrize(
    ("depth", "num_stages", "chunked", "caching", "policy", "windows"), list(kinds_of_traffic())
)
def test_thousands_of_requests_come_and_go(
    make_engine, make_request, depth, num_stages, chunked, caching, policy, windows, num_requests
):
    rng = np.random.default_rng([depth, chunked, caching, policy == "fcfs"])
    options = {"policy": priority} if policy == "priority" else {}
    engine = make_engine(
        depth=depth,
        num_stages=num_stages,
        windows=WINDOWS[windows][0],
        num_blocks=WINDOWS[windows][1],
        block_size=4,
        max_num_seqs=5,
        max_num_batched_tokens=13 if chunked else MAX_MODEL_LEN,
        max_model_len=MAX_MODEL_LEN,
        long_prefill_token_threshold=9,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=caching,
        failure_loses_cache=policy == "priority",
        **options,
    )
    traffic = Traffic(make_request, rng)
    while len(engine.done) < num_requests:
        if len(engine.received) < 30 and rng.random() < 0.5:
            for request in traffic.requests():
                engine.add(request)
        if engine.received and rng.random() < 0.03:
            engine.abort(*rng.choice(list(engine.received), size=2))
        if rng.random() < 0.02:
            engine.scheduler.reset_prefix_cache()
        engine.step(fails=rng.random() < 0.01)
    engine.drain()
    ends = {received.finish_reason for received in engine.done}
    assert ends == set(FinishReason)
    # With one window a request holds no more as it grows.
    assert engine.stats.num_preemptions > 0 or windows == "one window"
    assert engine.stats.num_requests_finished == next(traffic.ids)


@numbers_of_requests(120, 300)
@pytest.mark.parametrize(
    ("run", "windows"),
    [("plain", "windows"), ("overlapped", "everything"), ("overlapped pipeline", "everything")],
)
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
def test_thousands_of_requests_with_states_come_and_go(
    make_engine, make_request, run, windows, chunked, num_requests
):
    rng = np.random.default_rng([len(run), chunked])
    depth, num_stages = RUNS[run]
    engine = make_engine(
        depth=depth,
        num_stages=num_stages,
        windows=WINDOWS[windows][0],
        num_blocks=WINDOWS[windows][1],
        block_size=4,
        max_num_seqs=5,
        max_num_batched_tokens=13 if chunked else MAX_MODEL_LEN,
        max_model_len=MAX_MODEL_LEN,
        long_prefill_token_threshold=9,
        enable_chunked_prefill=chunked,
        snapshots=SNAPSHOTS,
        failure_loses_cache=num_stages == 1,
    )
    traffic = Traffic(make_request, rng)
    while len(engine.done) < num_requests:
        if len(engine.received) < 30 and rng.random() < 0.5:
            for request in traffic.requests():
                engine.add(request)
        if engine.received and rng.random() < 0.03:
            engine.abort(*rng.choice(list(engine.received), size=2))
        if rng.random() < 0.02:
            engine.scheduler.reset_prefix_cache()
        engine.step(fails=rng.random() < 0.01)
    engine.drain()
    assert {received.finish_reason for received in engine.done} == set(FinishReason)
    assert engine.stats.num_preemptions > 0
    # Prompts that are not cut rarely end where a snapshot is kept.
    assert engine.stats.prefix_cache_hits > 0 or not chunked
    assert 0 < engine.stats.num_snapshots_used <= SNAPSHOTS.count


@numbers_of_requests(120, 300)
@pytest.mark.parametrize(
    ("depth", "num_stages", "windows", "num_places", "has_files", "snapshots"),
    [
        (1, 1, "everything", 12, False, None),
        (4, 4, "windows", 60, False, None),
        (1, 1, "chunks", 40, True, None),
        (1, 1, "windows", 60, False, SNAPSHOTS),
        (4, 4, "everything", 30, True, SNAPSHOTS),
    ],
)
def test_blocks_go_to_the_host_and_come_back(
    make_engine,
    make_request,
    depth,
    num_stages,
    windows,
    num_places,
    has_files,
    snapshots,
    num_requests,
):
    """While copies arrive late or fail, steps fail, requests are aborted and prefixes forgotten."""
    rng = np.random.default_rng([depth, num_places])
    engine = make_engine(
        depth=depth,
        num_stages=num_stages,
        windows=WINDOWS[windows][0],
        num_blocks=WINDOWS[windows][1],
        max_num_seqs=5,
        max_num_batched_tokens=13,
        max_model_len=MAX_MODEL_LEN,
        num_places=num_places,
        has_files=has_files,
        snapshots=snapshots,
        failure_loses_cache=has_files,
    )
    traffic = Traffic(make_request, rng)
    while len(engine.done) < num_requests:
        if len(engine.received) < 30 and rng.random() < 0.5:
            for request in traffic.requests():
                gives = bool(rng.random() < 0.4)
                engine.add(msgspec.structs.replace(request, gives_blocks=gives))
        if engine.received and rng.random() < 0.03:
            engine.abort(*rng.choice(list(engine.received), size=2))
        if rng.random() < 0.02:
            engine.scheduler.reset_prefix_cache()
        engine.step(fails=rng.random() < 0.01)
    engine.drain()
    stats = engine.stats
    assert stats.num_requests_swapped == 0
    assert stats.num_preemptions and stats.host_blocks_stored and stats.host_blocks_loaded
    assert stats.external_cache_hits and stats.host_blocks_dropped
    assert bool(stats.host_blocks_read) == has_files


def test_a_preempted_request_computes_at_most_a_block_again(make_engine, make_request):
    engine = make_engine(num_blocks=16, block_size=4, num_places=64, max_model_len=64)
    engine.mover.is_prompt = True
    for index in range(8):
        engine.add(make_request(str(index), 20, 40))
    most_swapped = 0
    while len(engine.done) < 8:
        engine.step()
        requests = engine.scheduler._places.requests.values()
        swapped = [r for r in requests if r.status is RequestStatus.SWAPPED]
        assert len(swapped) == engine.stats.num_requests_swapped
        assert all(r.stats.num_preemptions and not r.tables for r in swapped)
        most_swapped = max(most_swapped, len(swapped))
    engine.drain()
    stats = engine.stats
    # Those that wait with their blocks on the host are reported, and nobody is in the end.
    assert most_swapped > 0 and stats.num_requests_swapped == 0
    assert stats.num_preemptions > 4 and stats.host_blocks_dropped == 0
    most = 8 * (20 + 40 - 1) + (4 + 1) * stats.num_preemptions
    assert stats.num_scheduled_tokens <= most, stats.num_preemptions


@numbers_of_requests(80, 200)
@pytest.mark.parametrize("depth", [0, 1], ids=["plain", "overlapped"])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
def test_the_oldest_request_is_served_in_every_step(
    make_engine, make_request, depth, chunked, num_requests
):
    """First come first served starves nobody: whoever is oldest gets on, until it is done."""
    rng = np.random.default_rng(depth)
    engine = make_engine(
        depth=depth,
        num_blocks=14,
        block_size=4,
        max_num_batched_tokens=9 if chunked else MAX_MODEL_LEN,
        max_model_len=MAX_MODEL_LEN,
        enable_chunked_prefill=chunked,
    )
    arrived = itertools.count()
    while len(engine.done) < num_requests:
        while len(engine.received) < 8:
            length = int(rng.integers(1, 40))
            max_tokens = int(rng.integers(1, MAX_MODEL_LEN - length + 1))
            engine.add(make_request(f"{next(arrived)}", length, max_tokens))
        oldest = next(iter(engine.scheduler._places.requests.values()))
        progress = oldest.num_computed_tokens
        schedule = engine.dispatch()
        assert oldest.status is RequestStatus.RUNNING
        assert oldest.num_computed_tokens > progress or oldest.num_tokens == oldest.max_num_tokens
        if schedule is None or len(engine.in_flight) > depth:
            engine.collect()
    assert engine.stats.num_preemptions > 0
    engine.drain()


def test_any_sequence_of_calls_keeps_the_invariants(make_engine, make_request):
    """Hypothesis chooses what happens, and how far the host runs ahead of the device."""

    class AnySequence(RuleBasedStateMachine):
        @initialize(
            num_blocks=st.integers(12, 24),
            budget=st.integers(1, 20),
            max_num_seqs=st.integers(1, 4),
            caching=st.booleans(),
            by_priority=st.booleans(),
            num_stages=st.integers(1, 4),
            windows=st.sampled_from([(None,), (None, 7), (5,), (None, 20, 3), (None, Chunk(6))]),
            has_states=st.booleans(),
            num_places=st.sampled_from([0, 8, 60]),
            has_files=st.booleans(),
        )
        def start(
            self,
            num_blocks,
            budget,
            max_num_seqs,
            caching,
            by_priority,
            num_stages,
            windows,
            has_states,
            num_places,
            has_files,
        ):
            self.num_stages = num_stages
            self.engine = make_engine(
                num_stages=num_stages,
                num_blocks=num_blocks,
                windows=windows,
                block_size=4,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=MAX_MODEL_LEN,
                enable_prefix_caching=caching,
                snapshots=SNAPSHOTS if has_states and caching else None,
                num_places=num_places if caching else 0,
                has_files=has_files,
                **({"policy": priority} if by_priority else {}),
            )
            self.ids = itertools.count()

        @rule(
            head=st.integers(0, 25),
            tail=st.lists(st.integers(0, 3), min_size=1, max_size=8),
            max_tokens=st.integers(1, 15),
            level=st.integers(-1, 1),
            stops=st.lists(st.integers(0, 49), max_size=10),
            prompt_logprobs=st.booleans(),
            siblings=st.integers(1, 3),
        )
        def add(self, head, tail, max_tokens, level, stops, prompt_logprobs, siblings):
            leader_id = None
            for _ in range(siblings):
                request_id = str(next(self.ids))
                self.engine.add(
                    make_request(
                        request_id,
                        BASE_PROMPT[:head] + tail,
                        max_tokens,
                        priority=level,
                        stop_token_ids=stops,
                        prompt_logprobs=1 if prompt_logprobs else None,
                        prefix_leader_id=leader_id,
                    )
                )
                leader_id = leader_id or request_id

        @precondition(lambda self: len(self.engine.in_flight) < 1 + self.num_stages)
        @rule(fails=st.sampled_from([False] * 9 + [True]))
        def dispatch(self, fails):
            self.engine.dispatch(fails=fails)

        @precondition(lambda self: self.engine.in_flight)
        @rule()
        def collect(self):
            self.engine.collect()

        @rule(count=st.integers(1, 20))
        def run(self, count):
            for _ in range(count):
                self.engine.step()

        @precondition(lambda self: self.engine.received)
        @rule(data=st.data())
        def abort(self, data):
            self.engine.abort(data.draw(st.sampled_from(sorted(self.engine.received))))

        @rule()
        def reset_prefix_cache(self):
            self.engine.scheduler.reset_prefix_cache()

        def teardown(self):
            if hasattr(self, "engine"):
                self.engine.drain()

    run_state_machine_as_test(
        AnySequence,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )
