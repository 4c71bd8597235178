"""A request whose logits are no numbers ends alone, and leaves nothing behind."""

import logging

import numpy as np
import pytest

from jaxllm.messages import FinishReason
from jaxllm.scheduler.corruption import CORRUPTED, corrupted_rows
from jaxllm.scheduler.schedule import NO_TOKEN, Schedule, StepResult

GLITCH = 49
HEAD = [1, 2, 3, 4, 5, 6, 7, 8]  # two blocks


@pytest.fixture(params=[0, 1, 2], ids=["plain", "overlapped", "two ahead"])
def make_glitching(request, make_engine):
    def make(**options):
        engine = make_engine(depth=request.param, **options)
        engine.device.glitch_token = GLITCH
        return engine

    return make


def test_it_ends_with_an_error_and_others_go_on(make_glitching, make_request):
    engine = make_glitching()
    before = engine.add(make_request("a", [1, 2, 3], max_tokens=9))
    corrupted = engine.add(make_request("b", [4, GLITCH, 5], max_tokens=9))
    after = engine.add(make_request("c", [6, 7, 8], max_tokens=9))
    engine.drain()
    assert (corrupted.finish_reason, corrupted.last.error) == (FinishReason.ERROR, CORRUPTED)
    assert corrupted.token_ids == []
    assert corrupted.last.stats.is_corrupted
    for healthy in (before, after):
        assert healthy.finish_reason is FinishReason.LENGTH
        assert not healthy.last.stats.is_corrupted
    assert engine.stats.num_requests_corrupted == 1


def test_nobody_finds_what_it_left_in_the_cache(make_glitching, make_request):
    engine = make_glitching()
    engine.add(make_request("a", [*HEAD, GLITCH]))
    engine.drain()
    # The device says so if this one reads what is not its own history.
    received = engine.add(make_request("b", [*HEAD, 9]))
    engine.drain()
    assert received.last.num_cached_tokens == 0
    assert received.finish_reason is FinishReason.LENGTH
    # And who has been given its blocks since.
    for name in "cdefgh":
        engine.add(make_request(name, 14, max_tokens=8))
    engine.drain()


def test_who_has_taken_over_its_blocks_starts_over_once(make_glitching, make_request, undisturbed):
    engine = make_glitching()
    engine.add(make_request("first", [*HEAD, 9], max_tokens=20))
    engine.step()
    requests = [
        make_request(name, [*HEAD, token], max_tokens=9) for name, token in (("a", 10), ("b", 11))
    ]
    healthy, corrupted = map(engine.add, requests)
    while not (healthy.token_ids and corrupted.token_ids):
        engine.step()
    assert {one.last.num_cached_tokens for one in (healthy, corrupted)} == {len(HEAD)}
    # What both have taken over turns out to be no numbers; and so does all that one computes.
    for request in engine.scheduler._places.running:
        engine.device.is_corrupted[request.slot] = request.request_id in "ab"
    engine.device.glitch_token = 11
    engine.drain()
    assert (healthy.finish_reason, healthy.last.stats.num_preemptions) == (FinishReason.LENGTH, 1)
    assert healthy.token_ids == undisturbed(requests[0])[0]
    assert (corrupted.finish_reason, corrupted.last.error) == (FinishReason.ERROR, CORRUPTED)
    assert corrupted.last.stats.num_preemptions == 1


def test_it_ends_when_its_prompt_has_logprobs_that_are_none(make_glitching, make_request):
    engine = make_glitching(max_num_batched_tokens=4)
    prompt = [GLITCH, *HEAD]
    corrupted = engine.add(make_request("a", prompt, prompt_logprobs=1))
    healthy = engine.add(make_request("b", HEAD, prompt_logprobs=1))
    # When its first chunk comes back, and not when the prompt is through.
    for _ in range(engine.depth + 1):
        assert corrupted.finish_reason is None
        engine.step()
    assert corrupted.finish_reason is FinishReason.ERROR
    assert corrupted.prompt_logprobs == []
    engine.drain()
    assert healthy.finish_reason is FinishReason.LENGTH


def test_one_that_was_preempted_meanwhile_ends_too(make_glitching, make_request):
    engine = make_glitching(num_blocks=16, enable_prefix_caching=False)
    received = [engine.add(make_request(name, 20, max_tokens=30)) for name in "ab"]
    engine.device.glitch_token = None
    for _ in range(8):
        engine.step()
    engine.device.is_corrupted = [True] * 4
    engine.drain()
    assert {one.finish_reason for one in received} == {FinishReason.ERROR}


def test_all_answers_to_a_prompt_end(make_glitching, make_request):
    engine = make_glitching()
    prompt = [*HEAD, GLITCH]
    received = [engine.add(make_request("0", prompt))]
    received += [engine.add(make_request(i, prompt, prefix_leader_id="0")) for i in "123"]
    engine.drain()
    assert {one.finish_reason for one in received} == {FinishReason.ERROR}
    assert engine.stats.num_requests_corrupted == 4


def test_it_is_said_once(make_glitching, make_request, caplog):
    engine = make_glitching()
    with caplog.at_level(logging.INFO, "jaxllm"):
        for name in "abc":
            engine.add(make_request(name, [4, GLITCH, 5], max_tokens=9))
        engine.drain()
    assert [CORRUPTED in record.getMessage() for record in caplog.records] == [True]


def test_a_row_that_samples_nothing_may_say_anything():
    one = np.ones(2, np.int32)
    schedule = Schedule(
        step=0, num_decodes=2, slots=one, num_tokens=one, context_lens=one, starts=one,
        samples=np.array([False, True]), token_ids=one, block_updates=np.zeros((0, 4), np.int32),
    )  # fmt: skip
    tokens = np.full(3, NO_TOKEN, np.int32)
    assert corrupted_rows(schedule, StepResult(tokens, None)) == {1}
    tokens[1] = 5
    assert corrupted_rows(schedule, StepResult(tokens, None)) == set()
