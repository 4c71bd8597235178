"""Snapshots of states: which are found, which give way, and where rows are cut for them."""

from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from jaxllm.cache_groups import StateSnapshots
from jaxllm.messages import FinishReason
from jaxllm.scheduler.kv.snapshots import SnapshotPool

PROMPT = list(range(30))
NUM_PLACES = 3


@pytest.fixture
def make_engine_with_snapshots(make_engine):
    def make(count=8, **options):
        snapshots = StateSnapshots(count=count, stride=8)
        return make_engine(block_size=4, num_blocks=64, snapshots=snapshots, **options)

    return make


@pytest.fixture
def serve(make_request):
    """Run a request to its end; return how many tokens were found, and the sizes of its chunks."""

    def run(engine, name, prompt, max_tokens=1, **fields):
        received = engine.add(make_request(name, prompt, max_tokens, **fields))
        sizes, found = [], engine.stats.prefix_cache_hits
        while received.finish_reason is None:
            schedule = engine.dispatch()
            sizes += [] if schedule is None else schedule.num_tokens.tolist()
            engine.collect()
        return engine.stats.prefix_cache_hits - found, [size for size in sizes if size > 1]

    return run


def test_rows_end_at_the_last_multiple_of_the_stride_that_they_reach(
    make_engine_with_snapshots, serve
):
    engine = make_engine_with_snapshots(depth=0, max_num_batched_tokens=20)
    # 16 of the 20 that the budget allows, then 8, then the rest.
    assert serve(engine, "a", PROMPT) == (0, [16, 8, 6])
    assert engine.stats.num_snapshots_used == 2


def test_the_second_request_ends_a_row_where_its_prompt_parts_and_the_third_goes_on_from_there(
    make_engine_with_snapshots, serve
):
    engine = make_engine_with_snapshots(depth=0, max_num_batched_tokens=64)
    assert serve(engine, "a", PROMPT) == (0, [24, 6])
    # All share 13 tokens, which are three blocks, and no snapshot is there yet.
    assert serve(engine, "b", PROMPT[:13] + [41] * 9) == (0, [12, 4, 6])
    assert serve(engine, "c", PROMPT[:13] + [42] * 9) == (12, [4, 6])


@pytest.mark.parametrize("count", [8, 2])
def test_a_prompt_that_ends_at_the_stride_is_found_by_the_second_request(
    make_engine_with_snapshots, serve, count
):
    """A longer prompt finds it, too, and so does a request whose predecessors took all places."""
    engine = make_engine_with_snapshots(count=count, depth=0, max_num_batched_tokens=64)
    serve(engine, "z", [*range(50, 65)])
    assert serve(engine, "a", PROMPT[:24]) == (0, [16, 8])
    assert serve(engine, "b", PROMPT[:24] + [7] * 4)[0] == 24
    assert serve(engine, "c", PROMPT[:24])[0] == 16


def test_what_is_generated_is_found_too(make_engine_with_snapshots, serve):
    engine = make_engine_with_snapshots(depth=0)
    serve(engine, "a", PROMPT[:3], max_tokens=20)
    answer = engine.done[-1].token_ids
    cached, _ = serve(engine, "b", PROMPT[:3] + answer + [7])
    assert cached == 16


def test_siblings_go_on_from_the_end_of_their_leaders_prompt(
    make_engine_with_snapshots, make_request
):
    engine = make_engine_with_snapshots(depth=1)
    for name in "abc":
        leader = None if name == "a" else "a"
        engine.add(make_request(name, PROMPT, 4, prefix_leader_id=leader))
    engine.drain()
    assert engine.stats.prefix_cache_hits == 2 * 28
    assert [one.finish_reason for one in engine.done] == [FinishReason.LENGTH] * 3


def test_a_salt_and_another_prompt_find_nothing(make_engine_with_snapshots, serve):
    engine = make_engine_with_snapshots(depth=0)
    serve(engine, "a", PROMPT)
    assert serve(engine, "b", PROMPT, cache_salt="salt")[0] == 0
    assert serve(engine, "c", PROMPT[1:])[0] == 0
    assert serve(engine, "d", PROMPT)[0] == 24


def test_a_preempted_request_goes_on_from_its_snapshot(make_engine_with_snapshots, make_request):
    engine = make_engine_with_snapshots(depth=0)
    engine.add(make_request("a", PROMPT[:20], 20))
    for _ in range(8):
        engine.step()
    scheduler = engine.scheduler
    scheduler._places.preempt(scheduler._places.running.pop())
    schedule = engine.dispatch()
    assert schedule.starts.tolist() == [24] and schedule.state_copies.loads.tolist() != []
    engine.drain()


def test_one_long_prompt_leaves_the_snapshots_of_others_alone(make_engine_with_snapshots, serve):
    engine = make_engine_with_snapshots(count=2, depth=0, max_num_batched_tokens=8)
    serve(engine, "a", PROMPT[:9])
    serve(engine, "b", PROMPT[::-1] + [9] * 20)  # six multiples of the stride
    assert serve(engine, "c", PROMPT[:9])[0] == 8


def test_a_failed_step_leaves_no_snapshot(make_engine_with_snapshots, make_request):
    engine = make_engine_with_snapshots(depth=0)
    engine.add(make_request("a", PROMPT[:9], 4))
    engine.dispatch(fails=True)
    engine.collect()
    assert engine.stats.num_snapshots_used == 0
    engine.drain()


def test_what_comes_from_the_host_takes_no_place_that_its_step_reads(
    make_engine_with_snapshots, make_request, serve
):
    """It is written before the step reads: two requests of a step would have one state."""
    engine = make_engine_with_snapshots(count=1, num_places=8, depth=0)
    engine.mover.is_prompt = True
    other = [40 + token for token in PROMPT[:10]]
    serve(engine, "a", PROMPT[:10])
    serve(engine, "b", other)  # the snapshot of "a" goes to the host
    received = [
        engine.add(make_request("c", other, 3)),
        engine.add(make_request("d", PROMPT[:10], 3)),
    ]
    engine.drain()
    assert [len(one.token_ids) for one in received] == [3, 3]
    assert engine.stats.prefix_cache_hits + engine.stats.external_cache_hits == 16


def test_the_pool_is_a_dictionary_that_forgets_the_least_recently_used():
    class AnySequence(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.pool = SnapshotPool(NUM_PLACES)
            self.contents = OrderedDict()  # content -> place, the least recently used first
            self.taken = []

        names = st.integers(0, 5).map(lambda i: bytes([i]))

        @rule()
        def take(self):
            used = len(self.contents) + len(self.taken)
            place = self.pool.take()
            if used == NUM_PLACES and self.contents:
                assert place == self.contents.popitem(last=False)[1]
            assert (place is None) == (len(self.taken) == NUM_PLACES)
            if place is not None:
                assert place not in self.taken and place not in self.contents.values()
                self.taken.append(place)

        @precondition(lambda self: self.taken)
        @rule(content=names)
        def name(self, content):
            place = self.taken.pop()
            self.pool.name(place, content)
            self.contents.setdefault(content, place)

        @precondition(lambda self: self.taken)
        @rule()
        def give_back(self):
            self.pool.give_back(self.taken.pop())

        @rule(content=names)
        def use(self, content):
            assert (content in self.pool) == (content in self.contents)
            if content in self.contents:
                self.contents.move_to_end(content)
                assert self.pool.use(content) == self.contents[content]

        @rule(content=names)
        def demote(self, content):
            self.pool.demote(content)
            if content in self.contents:
                self.contents.move_to_end(content, last=False)

        @rule(content=names)
        def forget(self, content):
            self.pool.forget(content)
            self.contents.pop(content, None)

        def teardown(self):
            self.pool.check(self.taken)
            assert self.pool.num_used == len(self.contents) + len(self.taken)

    run_state_machine_as_test(
        AnySequence, settings=settings(max_examples=60, deadline=None, derandomize=True)
    )
