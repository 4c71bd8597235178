"""The scheduler with drafts: whatever of them is accepted, every request brings what it would bring
alone, and the prefix cache gets what it would get."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.messages import FinishReason
from jaxllm.scheduler.corruption import corrupted_rows
from jaxllm.scheduler.schedule import (
    CARRIED_TOKEN,
    DRAFT_TOKEN,
    NO_TOKEN,
    DraftedResult,
    StepResult,
)
from jaxllm.speculative_config import Speculation

MAX_MODEL_LEN = 48


def speculation(num_drafts=3, up_to=4):
    return Speculation(
        method="ngram",
        num_drafts=num_drafts,
        min_lookup=2,
        max_lookup=4,
        drafts_by_requests=(num_drafts,) * up_to,
    )


def always(rng):
    return True


def never(rng):
    return False


@pytest.mark.parametrize("windows", [(None,), (None, 11, 5), (9,)], ids=str)
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("depth", [0, 1], ids=["plain", "overlapped"])
def test_hundreds_of_requests_come_and_go(make_engine, make_request, depth, caching, windows):
    rng = np.random.default_rng([depth, caching, len(windows)])
    engine = make_engine(
        depth=depth,
        windows=windows,
        num_blocks=14 if len(windows) == 1 and windows[0] else 18,
        max_num_seqs=5,
        max_num_batched_tokens=13,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=caching,
        failure_loses_cache=caching,
        speculation=speculation(up_to=5),
    )
    ids = itertools.count()
    while len(engine.done) < 150:
        if len(engine.received) < 12 and rng.random() < 0.5:
            prompt = list(range(rng.integers(0, 20))) + rng.integers(50, size=3).tolist()
            engine.add(
                make_request(
                    f"{next(ids)}",
                    prompt,
                    int(rng.integers(1, MAX_MODEL_LEN - len(prompt) + 1)),
                    min_tokens=int(rng.integers(0, 2)),
                    stop_token_ids=rng.integers(50, size=rng.integers(0, 3)).tolist(),
                    eos_token_ids=rng.integers(50, size=1).tolist(),
                    logprobs=rng.choice([None, 1]),
                    prompt_logprobs=rng.choice([None, None, 1]),
                )
            )
        if engine.received and rng.random() < 0.03:
            engine.abort(*rng.choice(list(engine.received), size=2))
        engine.step(fails=rng.random() < 0.01)
    engine.drain()
    stats = engine.stats
    assert {received.finish_reason for received in engine.done} == set(FinishReason)
    assert stats.num_preemptions > 0 or windows == (9,)
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert sum(stats.num_accepted_by_place) == stats.num_accepted_tokens
    assert stats.num_accepted_by_place == sorted(stats.num_accepted_by_place, reverse=True)


@given(
    num_drafts=st.integers(1, 4),
    num_blocks=st.integers(12, 20),
    windows=st.sampled_from([(None,), (None, 7), (5,), (None, 20, 3)]),
    spare_budget=st.integers(0, 8),
    requests=st.lists(
        st.tuples(st.integers(1, 25), st.integers(1, 20), st.integers(0, 6)), min_size=1, max_size=6
    ),
    right=st.lists(st.booleans(), min_size=1, max_size=40),
    ahead=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    data=st.data(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_any_acceptance_keeps_the_invariants(
    make_engine,
    make_request,
    num_drafts,
    num_blocks,
    windows,
    spare_budget,
    requests,
    right,
    ahead,
    data,
):
    """Hypothesis chooses which drafts are right, and how far the host runs ahead of the device."""
    answers = itertools.cycle(right)
    engine = make_engine(
        windows=windows,
        num_blocks=num_blocks,
        max_num_batched_tokens=2 * (1 + num_drafts) + spare_budget,
        max_model_len=MAX_MODEL_LEN,
        speculation=speculation(num_drafts),
        is_right=lambda rng: next(answers),
    )
    depths = itertools.cycle(ahead)
    for number, (length, max_tokens, gap) in enumerate(requests):
        engine.add(make_request(f"{number}", length, max_tokens))
        for _ in range(gap):
            engine.depth = next(depths) if engine.depth < 2 else 1
            engine.step()
        if engine.received and data.draw(st.integers(0, 9)) == 0:
            engine.abort(data.draw(st.sampled_from(sorted(engine.received))))
    engine.drain()


@pytest.mark.parametrize("num_drafts", [1, 2, 7])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 17, 24])
def test_right_drafts_take_the_fewest_steps(make_engine, make_request, num_drafts, num_tokens):
    engine = make_engine(depth=0, speculation=speculation(num_drafts), is_right=always)
    engine.device.rng = type("Always", (), {"random": lambda self: 0.0})()
    engine.add(make_request("a", 9, num_tokens))
    steps = 0
    while engine.received:
        steps += engine.step() is not None
    # The first step, which has the prompt, brings one token.
    assert steps == 1 + -(-(num_tokens - 1) // (1 + num_drafts))


def test_wrong_drafts_are_given_up_and_tried_again(make_engine, make_request):
    engine = make_engine(
        depth=0,
        max_model_len=400,
        num_blocks=100,
        speculation=speculation(),
        is_right=never,
    )
    engine.device.rng = type(
        "Wrong", (), {"random": lambda self: 0.0, "integers": lambda self, n: 51}
    )()
    engine.add(make_request("a", 9, 300))
    drafting = []
    while engine.received:
        schedule = engine.step()
        drafting.append(schedule is not None and schedule.num_drafts is not None)
    assert len(drafting) == 300
    assert 5 < sum(drafting) < 30
    assert any(drafting[200:])


def test_nobody_drafts_in_a_crowd(make_engine, make_request):
    engine = make_engine(depth=0, speculation=speculation(up_to=2), is_right=always)
    for number in range(3):
        engine.add(make_request(f"{number}", 5, 12 + 8 * number))
    in_a_crowd = []
    while engine.received:
        num_running = engine.scheduler.num_running
        schedule = engine.step()
        if num_running == 3:
            in_a_crowd.append(schedule.num_drafts)
    assert in_a_crowd and set(in_a_crowd) == {None}
    assert engine.stats.num_accepted_tokens > 0


def test_drafts_get_what_chunks_leave(make_engine, make_request):
    """A chunk that runs before rows with drafts takes more than the one token of a decode."""
    budget = 13
    engine = make_engine(
        depth=0,
        max_num_seqs=4,
        num_blocks=64,
        max_num_batched_tokens=budget,
        max_model_len=MAX_MODEL_LEN,
        long_prefill_token_threshold=5,
        speculation=speculation(3),
        is_right=always,
    )
    engine.device.rng = type("Always", (), {"random": lambda self: 0.0})()
    engine.add(make_request("long", 40, 2))
    for number in range(3):
        engine.add(make_request(f"{number}", 2, 20))
    beside_a_chunk = []
    while engine.received:
        schedule = engine.step()
        if schedule.num_drafts is not None and 5 in schedule.num_tokens:
            beside_a_chunk.append(schedule.total_tokens)
    # Two rows have three drafts each, and the third has none.
    assert max(beside_a_chunk) == budget


def test_drafts_leave_a_token_for_each_row_behind_them(make_engine, make_request):
    engine = make_engine(
        depth=0,
        max_num_seqs=3,
        max_num_batched_tokens=5,
        speculation=speculation(3),
        is_right=always,
    )
    engine.device.rng = type("Always", (), {"random": lambda self: 0.0})()
    for number in range(3):
        engine.add(make_request(f"{number}", 1, 12))
    drafting = []
    while len(engine.received) == 3:
        schedule = engine.step()
        if schedule.num_drafts is not None:
            drafting.append(schedule.num_tokens.tolist())
    assert drafting and all(len(numbers) == 3 for numbers in drafting)


def test_few_proposals_are_not_worth_a_step(make_engine, make_request):
    """One request of four has proposals: a step with drafts would take longer for the others."""
    engine = make_engine(depth=0, max_num_seqs=4, speculation=speculation(up_to=4), num_blocks=64)
    engine.device.propose = lambda slot: [51] * 3 if slot == 0 else []
    for number in range(4):
        engine.add(make_request(f"{number}", 5, 12))
    while len(engine.received) == 4:
        assert engine.step().num_drafts is None
    engine.drain()


def test_a_row_with_drafts_goes_on_from_the_newest_token(make_engine, make_request):
    engine = make_engine(depth=1, speculation=speculation(2), is_right=always)
    engine.device.rng = type("Always", (), {"random": lambda self: 0.0})()
    engine.add(make_request("a", 4, 20))
    seen = []
    while engine.received:
        schedule = engine.step()
        if schedule is not None and schedule.num_drafts is not None:
            assert schedule.num_decodes == 0
            assert schedule.num_drafts.tolist() == [2]
            seen.append(schedule.token_ids.tolist())
    assert [CARRIED_TOKEN, DRAFT_TOKEN, DRAFT_TOKEN] in seen


def test_the_last_tokens_get_fewer_drafts(make_engine, make_request):
    engine = make_engine(depth=0, speculation=speculation(3), is_right=never)
    engine.add(make_request("a", 4, 3))
    numbers = []
    while engine.received:
        schedule = engine.step()
        numbers.append(schedule.num_drafts.tolist() if schedule.num_drafts is not None else None)
    assert numbers[0] is None
    assert all(n is None or n == [1] for n in numbers)


def test_registered_blocks_are_those_of_a_plain_run(make_engine, make_request):
    names = []
    for options in ({}, {"speculation": speculation()}):
        engine = make_engine(num_blocks=32, **options)
        for number in range(3):
            engine.add(make_request(f"{number}", 10 + number, 30))
        engine.drain()
        names.append([set(pool._block_of) for pool in engine.kv._pools])
    plain, drafted = names
    assert drafted == plain


def test_drafts_preempt_nobody(make_engine, make_request):
    """If blocks are short, rows have as many drafts as have room in their blocks."""
    preemptions = []
    for options in ({}, {"speculation": speculation(3), "is_right": never}):
        engine = make_engine(depth=0, num_blocks=16, max_model_len=64, **options)
        engine.add(make_request("a", 15, 16))
        engine.add(make_request("b", 15, 17))
        engine.drain()
        preemptions.append(engine.stats.num_preemptions)
    assert preemptions == [0, 0]


def test_only_tokens_that_count_can_be_corrupted():
    zeros = np.zeros((3, 2), np.int32)
    more = zeros.copy()
    more[:, 1] = NO_TOKEN  # after the second draft
    drafted = DraftedResult(zeros[:, 0], np.array([1, 2, 2], np.int32), more, None)
    result = StepResult(zeros[:, 0], None, drafted=drafted)
    schedule = SimpleNamespace(num_rows=2, num_drafts=zeros[:, 0], samples=np.array([True, True]))
    assert corrupted_rows(schedule, result) == {1}
