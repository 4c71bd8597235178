"""Steps that follow one another through a pipeline do not wait for each other."""

import pytest

from jaxllm.scheduler.lanes import Lanes
from jaxllm.scheduler.schedule import CARRIED_TOKEN


def run_steps(engine, count):
    """So many schedules, with `engine.depth` steps under way."""
    schedules = []
    while len(schedules) < count:
        schedule = engine.step()
        if schedule is not None:
            schedules.append(schedule)
    return schedules


def add_all(engine, make_request, count, max_tokens=40):
    for i in range(count):
        engine.add(make_request(str(i), [i, 1, 2], max_tokens))


@pytest.mark.parametrize(("num_stages", "num_requests"), [(2, 6), (2, 5), (4, 6), (3, 3)])
def test_requests_are_spread_evenly_and_wait_for_nobody(
    make_engine, make_request, num_stages, num_requests
):
    engine = make_engine(
        num_stages=num_stages,
        depth=num_stages,
        num_blocks=100,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    add_all(engine, make_request, num_requests)
    # All prompts are in one step; then the lanes fill.
    steps = run_steps(engine, 30)
    assert steps[0].num_rows == num_requests
    for schedule in steps[1 + num_stages :]:
        assert schedule.step - schedule.carried_from >= num_stages
        fair = num_requests / num_stages
        assert fair - 1 < schedule.num_rows < fair + 1
    engine.drain()


def test_lanes_stay_equal_when_requests_end(make_engine, make_request):
    engine = make_engine(num_stages=2, depth=2, num_blocks=100, max_num_seqs=8)
    for i in range(8):
        # Those that come first, and are dealt out last, have the longest answers.
        engine.add(make_request(str(i), [i], 60 if i < 4 else 10))
    run_steps(engine, 40)
    assert [schedule.num_rows for schedule in run_steps(engine, 4)] == [2, 2, 2, 2]
    engine.drain()


def test_a_lone_request_runs_one_token_ahead_of_the_host_and_no_further(make_engine, make_request):
    engine = make_engine(num_stages=4, depth=4)
    engine.add(make_request("0", 3, 20))
    first, second = engine.dispatch(), engine.dispatch()
    assert (first.carried_from, second.carried_from) == (-1, 0)
    assert second.token_ids.tolist() == [CARRIED_TOKEN]
    assert engine.dispatch() is None
    engine.collect()
    assert engine.dispatch().carried_from == 1
    engine.drain()


def test_chunks_of_a_prompt_follow_each_other(make_engine, make_request):
    engine = make_engine(num_stages=4, depth=4, max_num_batched_tokens=8)
    engine.add(make_request("0", 20, 4))
    schedules = [engine.dispatch() for _ in range(3)]
    assert [schedule.total_tokens for schedule in schedules] == [8, 8, 4]
    assert [schedule.carried_from for schedule in schedules] == [-1, -1, -1]
    engine.drain()


def test_prompts_run_beside_every_lane(make_engine, make_request):
    engine = make_engine(num_stages=2, depth=2, max_num_batched_tokens=8, num_blocks=40)
    add_all(engine, make_request, 2)
    run_steps(engine, 6)
    engine.add(make_request("long", 30, 4))
    assert [schedule.total_tokens for schedule in run_steps(engine, 4)] == [8, 8, 8, 8]
    engine.drain()


def test_a_lane_without_room_leaves_its_turn(make_engine, make_request):
    """The last request loses its own blocks when it wants one more; the step is then the other's,
    although nothing is under way."""
    engine = make_engine(
        num_stages=2, depth=0, num_blocks=9, block_size=4, max_model_len=36, max_num_seqs=2
    )
    engine.add(make_request("0", 15, 17))
    engine.add(make_request("1", 15, 17))
    while not engine.stats.num_preemptions:
        schedule = engine.step()
        assert schedule is not None
    assert schedule.slots.tolist() == [0]
    engine.drain()


def test_without_overlap_every_token_is_on_the_host_first(make_request, make_engine):
    engine = make_engine(num_stages=2, depth=1, lanes=Lanes(2, max_in_flight=0))
    add_all(engine, make_request, 3)
    for schedule in run_steps(engine, 30):
        assert CARRIED_TOKEN not in schedule.token_ids
        assert schedule.carried_from == -1
    engine.drain()


def test_one_stage_has_no_lanes(make_engine, make_request):
    engine = make_engine(depth=1)
    add_all(engine, make_request, 3)
    for schedule in run_steps(engine, 5):
        assert schedule.num_rows == 3
        assert schedule.carried_from is None
    engine.drain()
