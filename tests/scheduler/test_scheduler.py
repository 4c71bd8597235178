import pytest

from jaxllm.errors import ValidationError
from jaxllm.messages import FinishReason
from jaxllm.scheduler.policy import priority
from jaxllm.scheduler.schedule import CARRIED_TOKEN, GO_ON

BOTH_LOOPS = pytest.mark.parametrize("depth", [0, 1], ids=["plain", "overlapped"])


def rows_of(schedule):
    """(slot, tokens computed) of each row."""
    return list(zip(schedule.slots.tolist(), schedule.num_tokens.tolist(), strict=True))


@BOTH_LOOPS
def test_one_request_gets_its_tokens_and_ends_by_length(make_engine, make_request, depth):
    engine = make_engine(depth=depth)
    received = engine.add(make_request("a", 10, max_tokens=5))
    engine.drain()
    assert received.finish_reason is FinishReason.LENGTH
    assert len(received.token_ids) == 5
    assert engine.stats.num_generation_tokens == 5
    assert engine.stats.num_prompt_tokens == 10
    # The last token is never computed: nothing is sampled from it.
    assert engine.stats.num_scheduled_tokens == 10 + 4


@BOTH_LOOPS
def test_no_step_is_scheduled_past_the_last_token(make_engine, make_request, depth):
    engine = make_engine(depth=depth)
    engine.add(make_request("a", 10, max_tokens=1))
    assert engine.dispatch() is not None
    assert engine.dispatch() is None
    engine.collect()
    engine.drain()


def test_long_prompts_are_split_by_the_budget(make_engine, make_request):
    engine = make_engine(depth=0, max_num_batched_tokens=16)
    engine.add(make_request("a", 40, max_tokens=2))
    steps = [engine.step() for _ in range(3)]
    assert [rows_of(step)[0][1] for step in steps] == [16, 16, 8]
    assert [step.samples.tolist() for step in steps] == [[False], [False], [True]]
    engine.drain()


def test_decodes_come_first_and_share_the_step_with_a_prompt(make_engine, make_request):
    engine = make_engine(depth=0, max_num_batched_tokens=16)
    engine.add(make_request("a", 8, max_tokens=5))
    engine.step()
    engine.add(make_request("b", 20, max_tokens=2))
    schedule = engine.step()
    assert schedule.num_decodes == 1
    assert schedule.num_tokens.tolist() == [1, 15]
    assert schedule.context_lens.tolist() == [9, 15]
    assert schedule.starts.tolist() == [GO_ON, 0]
    assert schedule.samples.tolist() == [True, False]
    assert schedule.slots.dtype == schedule.token_ids.dtype == schedule.block_updates.dtype == "i4"
    engine.drain()


def test_threshold_leaves_room_for_other_prompts(make_engine, make_request):
    engine = make_engine(depth=0, max_num_batched_tokens=16, long_prefill_token_threshold=6)
    for name in "ab":
        engine.add(make_request(name, 20))
    assert engine.step().num_tokens.tolist() == [6, 6]
    engine.drain()


def test_without_chunking_a_prompt_runs_whole_or_waits(make_engine, make_request):
    engine = make_engine(
        depth=0, max_num_batched_tokens=64, max_model_len=64, enable_chunked_prefill=False,
        num_blocks=32,
    )  # fmt: skip
    engine.add(make_request("a", 40))
    engine.add(make_request("b", 40))
    assert engine.step().num_tokens.tolist() == [40]
    assert engine.step().num_tokens.tolist() == [1, 40]
    engine.drain()


def test_without_chunking_the_budget_must_hold_the_longest_prompt(make_engine):
    with pytest.raises(AssertionError, match="max_num_batched_tokens=63 is below max_model_len=64"):
        make_engine(max_num_batched_tokens=63, enable_chunked_prefill=False)


def test_a_step_ahead_carries_the_token_that_the_host_does_not_know(make_engine, make_request):
    engine = make_engine()
    engine.add(make_request("a", 4, max_tokens=5))
    engine.dispatch()
    second = engine.dispatch()
    assert second.token_ids.tolist() == [CARRIED_TOKEN]
    assert second.context_lens.tolist() == [5]
    assert second.starts.tolist() == [GO_ON]
    engine.collect()
    engine.drain()


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_any_depth_gives_the_same_tokens(make_engine, make_request, depth):
    engine = make_engine(depth=depth, num_blocks=20)
    for name in "abcdef":
        engine.add(make_request(name, 11, max_tokens=30))
    engine.drain()
    assert engine.stats.num_preemptions > 0


@BOTH_LOOPS
@pytest.mark.parametrize("kind", ["eos", "stop"])
def test_a_stop_token_ends_the_request(make_engine, make_request, undisturbed, depth, kind):
    tokens, _, _ = undisturbed(make_request("a", 6, max_tokens=20))
    stop = {f"{kind}_token_ids": [tokens[5]]}
    engine = make_engine(depth=depth)
    received = engine.add(make_request("a", 6, max_tokens=20, **stop))
    engine.drain()
    assert received.finish_reason is FinishReason.STOP
    assert received.last.stop_reason == (None if kind == "eos" else tokens[5])
    assert received.token_ids == tokens[: tokens.index(tokens[5]) + 1]


def test_end_of_sequence_wins_over_a_stop_token(make_engine, make_request, undisturbed):
    first = undisturbed(make_request("a", 6))[0][0]
    engine = make_engine()
    received = engine.add(make_request("a", 6, eos_token_ids=[first], stop_token_ids=[first]))
    engine.drain()
    assert received.finish_reason is FinishReason.STOP
    assert received.last.stop_reason is None


def test_min_tokens_holds_stop_tokens_back(make_engine, make_request, undisturbed):
    tokens, _, _ = undisturbed(make_request("a", 6, max_tokens=8))
    engine = make_engine()
    received = engine.add(
        make_request("a", 6, max_tokens=8, min_tokens=8, stop_token_ids=tokens[:3])
    )
    engine.drain()
    assert received.token_ids == tokens


def test_admission_tells_the_device_what_it_must_know(make_engine, make_request):
    engine = make_engine(depth=0)
    request = make_request(
        "a", 6, eos_token_ids=[63], stop_token_ids=[69, 63], bad_word_ids=[[1, 2]]
    )
    engine.add(request)
    schedule = engine.step()
    (admission,) = schedule.admissions
    assert admission.slot == schedule.slots[0]
    assert admission.sampling_params is request.sampling_params
    assert admission.stop_token_ids == [63, 69]
    assert admission.bad_word_ids == [[1, 2]]
    assert admission.prompt_token_ids == request.prompt_token_ids
    assert admission.output_token_ids == []
    assert not engine.step().admissions
    engine.drain()


def test_only_new_blocks_travel(make_engine, make_request):
    engine = make_engine(depth=0, block_size=4)
    engine.add(make_request("a", 6, max_tokens=6))
    updates = [engine.step().block_updates for _ in range(5)]
    assert [len(update) for update in updates] == [2, 0, 0, 1, 0]
    assert updates[0][:, 2].tolist() == [0, 1]
    assert updates[3][:, 2].tolist() == [2]
    engine.drain()


@BOTH_LOOPS
def test_preempted_request_continues_where_it_was(make_engine, make_request, depth):
    engine = make_engine(depth=depth, num_blocks=16, enable_prefix_caching=False)
    first = engine.add(make_request("a", 20, max_tokens=30))
    second = engine.add(make_request("b", 20, max_tokens=30))
    engine.drain()
    assert engine.stats.num_preemptions > 0
    assert first.last.stats.num_preemptions == 0
    assert second.last.stats.num_preemptions == engine.stats.num_preemptions
    assert second.last.num_cached_tokens == 0
    # The prompt was computed more than once, and is counted once.
    assert engine.stats.num_prompt_tokens == 40
    assert engine.stats.num_scheduled_tokens > 40 + 2 * 29 + 20


def test_preempted_request_finds_its_blocks_again(make_engine, make_request):
    engine = make_engine(num_blocks=16, block_size=4)
    engine.add(make_request("a", 20, max_tokens=24))
    engine.add(make_request("b", 20, max_tokens=24))
    engine.drain()
    assert engine.stats.num_preemptions > 0
    # The first request took the tail of the second one's blocks and left it the prompt's.
    assert engine.stats.num_scheduled_tokens < 2 * (20 + 23) + 20


@BOTH_LOOPS
def test_stats_that_were_handed_out_stay_as_they_were(make_engine, make_request, depth):
    engine = make_engine(depth=depth, num_blocks=16)
    engine.add(make_request("a", 20, max_tokens=30))
    received = engine.add(make_request("b", 20, max_tokens=30))
    engine.drain()
    assert engine.stats.num_preemptions > 0
    first, *later, last = received.stats
    assert (first.num_preemptions, first.last_token_ts) == (0, first.first_token_ts)
    assert last.num_preemptions == engine.stats.num_preemptions
    # A preemption is reported with the next token: an answer that ends in the frontend, by a stop
    # string, has no last word of the engine.
    assert [stats.num_preemptions for stats in later] == list(range(1, last.num_preemptions + 1))


def test_victim_is_the_last_in_policy_order(make_engine, make_request):
    engine = make_engine(policy=priority, num_blocks=16)
    low = engine.add(make_request("low", 20, max_tokens=30, priority=5))
    engine.step()
    engine.step()
    high = engine.add(make_request("high", 20, max_tokens=30, priority=-1))
    engine.drain()
    assert low.last.stats.num_preemptions > 0
    assert high.last.stats.num_preemptions == 0
    assert [received.request.request_id for received in engine.done] == ["high", "low"]


def test_priority_orders_those_who_wait(make_engine, make_request):
    engine = make_engine(policy=priority, max_num_seqs=1)
    for name, level in [("b", 2), ("a", 1), ("c", 2)]:
        engine.add(make_request(name, 4, priority=level, arrival_time=float(level)))
    engine.drain()
    assert [received.request.request_id for received in engine.done] == ["a", "b", "c"]


def test_nobody_is_admitted_in_the_step_of_a_preemption(make_engine, make_request):
    engine = make_engine(depth=0, num_blocks=16, max_num_seqs=3)
    engine.add(make_request("a", 28, max_tokens=30))
    engine.add(make_request("b", 16, max_tokens=30))
    for _ in range(4):
        engine.step()
    engine.add(make_request("c", 2, max_tokens=2))
    while engine.stats.num_preemptions == 0:
        schedule = engine.step()
    assert not schedule.admissions
    engine.drain()


def test_a_prompt_that_does_not_fit_yet_is_not_overtaken(make_engine, make_request):
    engine = make_engine(depth=0, num_blocks=16, block_size=4)
    first = engine.add(make_request("a", 30, max_tokens=10))
    engine.add(make_request("big", 40))
    engine.add(make_request("small", 4))
    while first.finish_reason is None:
        schedule = engine.step()
        assert schedule.slots.tolist() == [0]
    assert engine.stats.num_preemptions == 0
    engine.drain()


def test_prompts_admitted_together_do_not_preempt_each_other(make_engine, make_request):
    engine = make_engine(num_blocks=16, block_size=4, max_num_batched_tokens=8)
    for name in "abc":
        engine.add(make_request(name, 40, max_tokens=1))
    engine.drain()
    assert engine.stats.num_preemptions == 0


def test_a_prompt_leaves_a_block_for_each_running_request(make_engine, make_request):
    engine = make_engine(depth=0, num_blocks=16, block_size=4, max_num_batched_tokens=64)
    running = engine.add(make_request("a", 31, max_tokens=6))
    engine.step()
    engine.add(make_request("all that is left", 32, max_tokens=1))
    while running.finish_reason is None:
        assert engine.step().slots.tolist() == [0]
    engine.drain()
    assert engine.stats.num_preemptions == 0


def test_equal_prompts_share_blocks(make_engine, make_request):
    engine = make_engine(block_size=4)
    prompt = list(range(18))
    first = engine.add(make_request("a", prompt))
    engine.drain()
    second = engine.add(make_request("b", prompt))
    engine.drain()
    assert first.last.num_cached_tokens == 0
    assert second.last.num_cached_tokens == 16
    assert engine.stats.prefix_cache_queries == 36
    assert engine.stats.prefix_cache_hits == 16
    assert engine.stats.num_prompt_tokens == 20


def test_a_full_hit_computes_the_last_token_again(make_engine, make_request):
    engine = make_engine(block_size=4)
    prompt = list(range(16))
    engine.add(make_request("a", prompt))
    engine.drain()
    again = engine.add(make_request("b", prompt))
    engine.drain()
    assert again.last.num_cached_tokens == 12


def test_outputs_are_cached_for_the_next_turn(make_engine, make_request):
    engine = make_engine(block_size=4)
    first = engine.add(make_request("a", 6, max_tokens=12))
    engine.drain()
    conversation = first.request.prompt_token_ids + first.token_ids + [1, 2, 3]
    second = engine.add(make_request("b", conversation))
    engine.drain()
    assert second.last.num_cached_tokens == 16


def test_other_salt_shares_nothing(make_engine, make_request):
    engine = make_engine()
    prompt = list(range(18))
    received = []
    for name, salt in [("a", "x"), ("b", "y"), ("c", None), ("d", "x")]:
        received.append(engine.add(make_request(name, prompt, cache_salt=salt)))
        engine.drain()
    assert [one.last.num_cached_tokens for one in received] == [0, 0, 0, 16]


def test_caching_off_shares_nothing(make_engine, make_request):
    engine = make_engine(enable_prefix_caching=False)
    for name in "ab":
        received = engine.add(make_request(name, list(range(18))))
        engine.drain()
    assert received.last.num_cached_tokens == 0
    assert engine.stats.prefix_cache_queries == 0


@BOTH_LOOPS
@pytest.mark.parametrize("caching", [True, False])
def test_siblings_share_the_prompt(make_engine, make_request, depth, caching):
    engine = make_engine(
        depth=depth, enable_prefix_caching=caching, num_blocks=16, block_size=4, max_num_seqs=4
    )
    prompt = list(range(22))
    leader = engine.add(make_request("0", prompt))
    followers = [engine.add(make_request(f"{i}", prompt, prefix_leader_id="0")) for i in (1, 2, 3)]
    engine.step()
    assert engine.scheduler.num_running == 1
    assert engine.stats.num_requests_deferred == 3  # for the leader, not for room
    engine.step()
    assert engine.scheduler.num_waiting == 3
    engine.step()
    # Apart from each other, four prompts of six blocks would not fit into sixteen.
    assert engine.scheduler.num_running == 4
    engine.drain()
    assert leader.last.num_cached_tokens == 0
    assert [one.last.num_cached_tokens for one in followers] == [20, 20, 20]


def test_with_caching_off_only_siblings_share(make_engine, make_request):
    engine = make_engine(enable_prefix_caching=False)
    prompt = list(range(18))
    for group in ("x", "y"):
        leader = engine.add(make_request(f"{group}0", prompt))
        follower = engine.add(make_request(f"{group}1", prompt, prefix_leader_id=f"{group}0"))
        engine.drain()
        assert leader.last.num_cached_tokens == 0
        assert follower.last.num_cached_tokens == 16


@pytest.mark.parametrize("caching", [True, False])
def test_sibling_of_a_leader_that_already_decodes_shares(make_engine, make_request, caching):
    engine = make_engine(enable_prefix_caching=caching)
    prompt = list(range(14))
    engine.add(make_request("0", prompt, max_tokens=10))
    for _ in range(3):
        engine.step()
    follower = engine.add(make_request("1", prompt, prefix_leader_id="0"))
    engine.drain()
    assert follower.last.num_cached_tokens == 12


def test_followers_of_an_aborted_leader_run_alone(make_engine, make_request):
    engine = make_engine()
    engine.add(make_request("0", 18))
    follower = engine.add(make_request("1", 18, prefix_leader_id="0"))
    engine.abort("0")
    engine.drain()
    assert follower.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("steps", range(6))
def test_abort_at_any_moment_ends_exactly_once(make_engine, make_request, steps):
    engine = make_engine(max_num_seqs=1)
    running = engine.add(make_request("a", 20, max_tokens=10))
    waiting = engine.add(make_request("b", 20, max_tokens=10))
    for _ in range(steps):
        engine.dispatch()
        if len(engine.in_flight) > 1:
            engine.collect()
    engine.abort("b", "a", "a", "unknown")
    engine.abort("a")
    assert running.finish_reason is waiting.finish_reason is FinishReason.ABORT
    assert engine.stats.num_blocks_used == 0
    engine.drain()


def test_a_reused_id_is_another_request(make_engine, make_request):
    engine = make_engine()
    engine.add(make_request("a", 4, max_tokens=10))
    engine.dispatch()
    engine.dispatch()
    engine.abort("a")
    second = engine.add(make_request("a", [7] * 9, max_tokens=3))
    engine.dispatch()
    engine.collect()
    engine.collect()
    assert second.token_ids == []
    engine.drain()
    assert second.finish_reason is FinishReason.LENGTH


def test_duplicate_id_is_refused(make_engine, make_request):
    engine = make_engine()
    engine.add(make_request("a", 4))
    with pytest.raises(ValidationError, match="request_id='a'"):
        engine.scheduler.add_request(make_request("a", 5))
    engine.drain()


@BOTH_LOOPS
def test_failed_step_ends_its_requests_and_no_others(make_engine, make_request, depth):
    engine = make_engine(depth=depth, max_num_seqs=1)
    touched = engine.add(make_request("a", 12, max_tokens=10))
    waiting = engine.add(make_request("b", 12, max_tokens=10))
    engine.step()
    engine.step(fails=True)
    while touched.finish_reason is None:
        engine.collect()
    assert touched.finish_reason is FinishReason.ERROR
    assert touched.last.error == "the step failed"
    engine.drain()
    assert waiting.finish_reason is FinishReason.LENGTH


def test_blocks_of_a_failed_step_are_never_found(make_engine, make_request):
    engine = make_engine(depth=0)
    prompt = list(range(14))
    engine.add(make_request("a", prompt))
    engine.step(fails=True)
    again = engine.add(make_request("b", prompt))
    engine.drain()
    assert again.last.num_cached_tokens == 0


def test_failure_reaches_who_took_over_blocks_of_the_failed_step(make_engine, make_request):
    engine = make_engine(depth=1)
    prompt = list(range(14))
    engine.add(make_request("a", prompt))
    engine.dispatch(fails=True)
    heir = engine.add(make_request("b", prompt))
    engine.dispatch()
    engine.collect()
    assert heir.finish_reason is FinishReason.ERROR
    engine.drain()


def test_requests_outside_a_failed_step_survive_the_loss_of_the_cache(make_engine, make_request):
    engine = make_engine(
        depth=0, policy=priority, max_num_batched_tokens=4, failure_loses_cache=True
    )
    survivor = engine.add(make_request("low", 3, max_tokens=10, priority=1))
    engine.step()
    victim = engine.add(make_request("high", 20, priority=0))
    engine.step()
    engine.step(fails=True)  # the prompt of the other took the whole budget
    assert victim.finish_reason is FinishReason.ERROR
    assert len(survivor.token_ids) == 2
    engine.drain()
    assert survivor.finish_reason is FinishReason.LENGTH
    assert survivor.last.stats.num_preemptions == 1


def test_prefix_cache_is_reset_only_when_idle(make_engine, make_request):
    engine = make_engine()
    prompt = list(range(14))
    engine.add(make_request("a", prompt))
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.drain()
    assert engine.scheduler.reset_prefix_cache()
    again = engine.add(make_request("b", prompt))
    engine.drain()
    assert again.last.num_cached_tokens == 0


@BOTH_LOOPS
def test_logprobs_come_with_their_tokens(make_engine, make_request, depth):
    engine = make_engine(depth=depth)
    plain = engine.add(make_request("a", 9))
    chosen = engine.add(make_request("b", 9, logprobs=0))
    best = engine.add(make_request("c", 9, logprobs=2))
    engine.drain()
    assert plain.logprobs == []
    assert [len(entry.token_ids) for entry in chosen.logprobs] == [1] * 4
    assert [len(entry.token_ids) for entry in best.logprobs] == [3] * 4


@BOTH_LOOPS
def test_prompt_logprobs_cover_a_chunked_prompt_once(make_engine, make_request, depth):
    engine = make_engine(depth=depth, max_num_batched_tokens=7)
    prompt = list(range(30))
    engine.add(make_request("warm", prompt))
    engine.drain()
    received = engine.add(make_request("a", prompt, prompt_logprobs=1))
    other = engine.add(make_request("b", prompt))
    engine.drain()
    assert len(received.prompt_logprobs) == 29
    assert received.last.num_cached_tokens == 0
    assert other.last.num_cached_tokens == 28
    assert other.prompt_logprobs == []


def test_prompt_logprobs_are_not_repeated_after_a_preemption(make_engine, make_request):
    engine = make_engine(num_blocks=16, max_num_batched_tokens=5)
    engine.add(make_request("a", 20, max_tokens=40))
    received = engine.add(make_request("b", 20, max_tokens=20, prompt_logprobs=0))
    engine.drain()
    assert received.last.stats.num_preemptions > 0
    assert len(received.prompt_logprobs) == 19


def test_times_come_in_order(make_engine, make_request):
    engine = make_engine()
    received = engine.add(make_request("a", 20, max_tokens=3))
    engine.drain()
    stats = received.last.stats
    assert 0 < stats.queued_ts <= stats.scheduled_ts <= stats.first_token_ts <= stats.last_token_ts


def test_gauges_follow(make_engine, make_request):
    engine = make_engine(max_num_seqs=2, block_size=4, depth=0)
    for name in "abc":
        engine.add(make_request(name, 8, max_tokens=3))
    assert engine.stats.num_requests_waiting == 3
    engine.step()
    stats = engine.stats
    assert (stats.num_requests_running, stats.num_requests_waiting) == (2, 1)
    assert (stats.num_blocks, stats.num_blocks_used) == (16, 4)
    engine.drain()
