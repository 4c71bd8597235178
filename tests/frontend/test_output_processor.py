import math
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.errors import ValidationError
from jaxllm.frontend.input_processor import InputProcessor
from jaxllm.frontend.output_processor import OutputProcessor
from jaxllm.messages import EngineOutput, FinishReason, PositionLogprobs, RequestStats
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


class Frontend:
    """Both processors, and the engine played by the test."""

    def __init__(self, config, info, tokenizer):
        self.input = InputProcessor(config, info, tokenizer)
        self.ended = []
        self.output = OutputProcessor(tokenizer, on_end=self.ended.append)
        self.tokenizer = tokenizer

    def add(self, request_id="r", prompt="hello", **params):
        processed = self.input.process(request_id, prompt, SamplingParams(**params))
        self.output.add_request(processed)
        return processed

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def feed(self, *outputs):
        return self.output.process(list(outputs))

    def feed_each(self, token_ids, request_id="r", finish=FinishReason.LENGTH):
        """One token per step, the last one with a finish reason; all that came of it."""
        outputs, abort_ids = [], []
        for i, token in enumerate(token_ids):
            reason = finish if i == len(token_ids) - 1 else None
            out = EngineOutput(request_id=request_id, new_token_ids=[token], finish_reason=reason)
            processed = self.feed(out)
            outputs += processed.request_outputs
            abort_ids += processed.abort_ids
        return outputs, abort_ids


@pytest.fixture
def frontend(config, info, byte_level):
    return Frontend(config, info, byte_level)


def out(request_id, token_ids=(), **fields):
    return EngineOutput(request_id=request_id, new_token_ids=list(token_ids), **fields)


# ---- output kinds


def test_cumulative_outputs_hold_all_so_far_and_do_not_change_later(frontend):
    frontend.add(output_kind=CUMULATIVE)
    ids = frontend.ids("hello world")
    outputs, _ = frontend.feed_each(ids)
    for i, output in enumerate(outputs, 1):
        assert output.outputs[0].token_ids == ids[:i]
        assert output.outputs[0].text == frontend.tokenizer.decode(ids[:i])
    assert [output.finished for output in outputs] == [False] * (len(ids) - 1) + [True]
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert not frontend.output.has_unfinished()


def test_deltas_hold_what_is_new(frontend):
    frontend.add(output_kind=DELTA)
    ids = frontend.ids("hello world 😀")
    outputs, _ = frontend.feed_each(ids)
    assert [o.outputs[0].token_ids for o in outputs] == [[token] for token in ids]
    assert "".join(o.outputs[0].text for o in outputs) == "hello world 😀"


def test_final_only_says_nothing_before_the_end(frontend):
    frontend.add(output_kind=FINAL_ONLY)
    ids = frontend.ids("hello world")
    (output,), _ = frontend.feed_each(ids)
    assert (output.request_id, output.prompt, output.finished) == ("r", "hello", True)
    assert output.prompt_token_ids == frontend.tokenizer.encode("hello")
    assert (output.outputs[0].token_ids, output.outputs[0].text) == (ids, "hello world")


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    data=st.data(),
    stop=st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 3),
)
def test_streams_add_up_to_the_final_output(data, stop, include, min_tokens, frontend):
    letters = frontend.ids("ab") + [frontend.tokenizer.hf.convert_tokens_to_ids("ä")]
    ids = data.draw(st.lists(st.sampled_from(letters), min_size=4, max_size=16))
    chunks = data.draw(st.lists(st.integers(1, 4), min_size=16, max_size=16))
    params = {
        "stop": stop,
        "include_stop_str_in_output": include,
        "min_tokens": min_tokens,
        "max_tokens": 16,
    }
    finals = []
    for kind in (DELTA, CUMULATIVE, FINAL_ONLY):
        frontend.add(kind.name, output_kind=kind, **params)
        rest, sizes, outputs = ids, iter(chunks), []
        while rest:
            size = next(sizes)
            part, rest = rest[:size], rest[size:]
            reason = None if rest else FinishReason.LENGTH
            outputs += frontend.feed(out(kind.name, part, finish_reason=reason)).request_outputs
        answers = [output.outputs[0] for output in outputs]
        assert [answer.finished() for answer in answers] == [False] * (len(answers) - 1) + [True]
        if kind is DELTA:
            text = "".join(answer.text for answer in answers)
            token_ids = sum((answer.token_ids for answer in answers), [])
        else:
            text, token_ids = answers[-1].text, answers[-1].token_ids
            assert all(text.startswith(answer.text) for answer in answers)
        finals.append((text, token_ids, answers[-1].finish_reason, answers[-1].stop_reason))
    assert finals[0] == finals[1] == finals[2]


# ---- n answers


def test_answers_of_one_prompt_gather_under_its_id(frontend):
    frontend.add(n=3, output_kind=FINAL_ONLY)
    a, b, c = frontend.ids("abc")
    assert frontend.feed(out("0_r", [a]), out("2_r", [c])).request_outputs == []
    ended = [out(f"{i}_r", [b], finish_reason=FinishReason.LENGTH) for i in (2, 0)]
    assert frontend.feed(*ended).request_outputs == []
    last = out("1_r", [b], finish_reason=FinishReason.STOP, stop_reason=b)
    (output,) = frontend.feed(last).request_outputs
    assert output.request_id == "r"
    assert [(o.index, o.token_ids) for o in output.outputs] == [(0, [a, b]), (1, [b]), (2, [c, b])]
    assert [o.finish_reason for o in output.outputs] == ["length", "stop", "length"]
    assert output.metrics.num_generation_tokens == 5


def test_a_stream_of_several_answers_is_finished_when_all_are(frontend):
    frontend.add(n=2, output_kind=DELTA)
    a, b = frontend.ids("ab")
    (first,) = frontend.feed(out("0_r", [a]), out("1_r", [b])).request_outputs
    assert [(o.index, o.text) for o in first.outputs] == [(0, "a"), (1, "b")]
    (second,) = frontend.feed(out("1_r", [a], finish_reason=FinishReason.LENGTH)).request_outputs
    assert [(o.index, o.finish_reason) for o in second.outputs] == [(1, "length")]
    assert not second.finished
    (third,) = frontend.feed(out("0_r", [b], finish_reason=FinishReason.LENGTH)).request_outputs
    assert [o.index for o in third.outputs] == [0]
    assert third.finished


def test_cumulative_output_shows_all_answers_each_time(frontend):
    frontend.add(n=2, output_kind=CUMULATIVE)
    a, b = frontend.ids("ab")
    frontend.feed(out("0_r", [a], finish_reason=FinishReason.LENGTH))
    (output,) = frontend.feed(out("1_r", [b])).request_outputs
    assert [(o.text, o.finish_reason) for o in output.outputs] == [("a", "length"), ("b", None)]


# ---- stop strings and stop tokens


def test_stop_string_across_tokens_ends_the_answer_and_the_engine_is_told(frontend):
    frontend.add(stop=["lo wo"], output_kind=DELTA)
    ids = frontend.ids("hel") + frontend.ids("lo") + frontend.ids(" w") + frontend.ids("or")
    outputs, abort_ids = frontend.feed_each([*ids, *frontend.ids("ld")], finish=None)
    assert abort_ids == ["r"]
    assert "".join(o.outputs[0].text for o in outputs) == "hel"
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "lo wo")
    assert outputs[-1].metrics.last_token_ts > 0


def test_stop_string_wins_over_the_end_that_came_with_it(frontend):
    frontend.add(stop=["b"], output_kind=FINAL_ONLY)
    (output,), abort_ids = frontend.feed_each(frontend.ids("ab"), finish=FinishReason.LENGTH)
    assert abort_ids == []  # the engine has ended it by itself
    assert output.outputs[0].stop_reason == "b"
    assert output.outputs[0].finish_reason == "stop"


def test_tokens_after_a_stop_string_are_dropped_with_their_logprobs(frontend):
    frontend.add(stop=["b"], output_kind=FINAL_ONLY, logprobs=0)
    ids = frontend.ids("a") + frontend.ids("b") + frontend.ids("c")
    logprobs = [PositionLogprobs([token], [-1.0], 1) for token in ids]
    (output,) = frontend.feed(out("r", ids, new_logprobs=logprobs)).request_outputs
    answer = output.outputs[0]
    assert (answer.text, answer.token_ids) == ("a", ids[:2])
    assert len(answer.logprobs) == 2
    assert answer.cumulative_logprob == -2.0
    assert output.metrics.num_generation_tokens == 2


def test_held_back_text_comes_out_when_the_answer_ends_otherwise(frontend):
    frontend.add(stop=["abcd"], output_kind=DELTA)
    outputs, _ = frontend.feed_each(frontend.ids("a") + frontend.ids("b") + frontend.ids("c"))
    assert [o.outputs[0].text for o in outputs] == ["", "", "abc"]


def test_min_tokens_delays_the_search_for_stop_strings(frontend):
    frontend.add(stop=["b"], min_tokens=2, output_kind=FINAL_ONLY)
    b = frontend.ids("b")[0]
    (output,), _ = frontend.feed_each([b] * 5, finish=None)
    assert len(output.outputs[0].token_ids) == 3
    assert output.outputs[0].text == "bb"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_text_of_a_stop_token_is_shown_only_if_included(include, text, frontend):
    a, b = frontend.ids("ab")
    frontend.add(stop_token_ids=[b], include_stop_str_in_output=include, output_kind=FINAL_ONLY)
    frontend.feed(out("r", [a]))
    end = out("r", [b], finish_reason=FinishReason.STOP, stop_reason=b)
    (output,) = frontend.feed(end).request_outputs
    answer = output.outputs[0]
    assert (answer.text, answer.token_ids, answer.stop_reason) == (text, [a, b], b)


@pytest.mark.parametrize(("last", "text"), [("b", "ab"), (None, "a")])
def test_the_last_token_of_a_form_is_shown_unless_it_is_a_stop_token(last, text, frontend):
    a, b = frontend.ids("ab")
    c = frontend.ids("c")[0]
    params = SamplingParams(stop_token_ids=[c], output_kind=FINAL_ONLY)
    processed = frontend.input.process("r", "hello", params)
    processed.requests[0].grammar = "start: /ab?/"
    frontend.output.add_request(processed)
    frontend.feed(out("r", [a]))
    end = out("r", [c if last is None else b], finish_reason=FinishReason.STOP)
    (output,) = frontend.feed(end).request_outputs
    assert output.outputs[0].text == text


# ---- ends


def test_outputs_after_the_end_are_dropped(frontend):
    frontend.add(stop=["b"], output_kind=DELTA)
    frontend.feed_each(frontend.ids("b"), finish=None)
    late = frontend.feed(out("r", [5]), out("r", finish_reason=FinishReason.ABORT))
    assert late == ([], [])


def test_abort_is_idempotent_and_names_what_still_runs(frontend):
    frontend.add(n=3, output_kind=FINAL_ONLY)
    frontend.feed(out("1_r", [5], finish_reason=FinishReason.LENGTH))
    assert frontend.output.abort("r") == ["0_r", "2_r"]
    assert frontend.output.abort("r") == []
    assert frontend.output.abort("never seen") == []
    assert frontend.feed(out("0_r", [5])) == ([], [])
    assert not frontend.output.has_unfinished()


@pytest.mark.parametrize(("reason", "text"), [("ABORT", "abort"), ("ERROR", "error")])
def test_request_that_the_engine_ends_before_its_first_token_is_reported(reason, text, frontend):
    frontend.add(output_kind=FINAL_ONLY)
    error = "device lost" if reason == "ERROR" else None
    end = out("r", finish_reason=FinishReason[reason], error=error)
    (output,) = frontend.feed(end).request_outputs
    answer = output.outputs[0]
    assert output.finished
    assert (answer.finish_reason, answer.stop_reason, answer.text) == (text, error, "")


def test_ids_in_use_are_refused_until_they_are_free(frontend):
    frontend.add("r", n=2, output_kind=FINAL_ONLY)
    assert frontend.output.is_known("r")
    for request_id in ("r", "1_r"):
        with pytest.raises(ValidationError, match="already in use"):
            frontend.add(request_id)
    frontend.output.abort("r")
    frontend.add("r")
    assert frontend.output.num_unfinished == 1


# ---- logprobs, metrics


def test_logprobs_have_the_sampled_token_and_the_likeliest(frontend):
    a, b, c = frontend.ids("abc")
    frontend.add(logprobs=2, output_kind=FINAL_ONLY)
    positions = [
        PositionLogprobs([c, a, b], [-3.0, -0.5, -1.0], 7),
        PositionLogprobs([b, a, b], [-1.0, -0.5, -1.0], 2),
    ]
    end = out("r", [c, b], new_logprobs=positions, finish_reason=FinishReason.LENGTH)
    answer = frontend.feed(end).request_outputs[0].outputs[0]
    first, second = answer.logprobs
    assert [(t, e.logprob, e.rank, e.decoded_token) for t, e in first.items()] == [
        (c, -3.0, 7, "c"),
        (a, -0.5, 1, "a"),
        (b, -1.0, 2, "b"),
    ]
    assert {token: entry.rank for token, entry in second.items()} == {b: 2, a: 1}
    assert answer.cumulative_logprob == -4.0


def test_deltas_carry_their_own_logprobs_and_the_prompts_once(frontend):
    a, b = frontend.ids("ab")
    frontend.add(prompt=[a, b, a], logprobs=0, prompt_logprobs=0, output_kind=DELTA)
    chunks = [[PositionLogprobs([b], [-1.0], 1)], [PositionLogprobs([a], [-2.0], 3)]]
    assert frontend.feed(out("r", new_prompt_logprobs=chunks[0])).request_outputs == []
    step = [PositionLogprobs([a], [-0.25], 1)]
    (first,) = frontend.feed(
        out("r", [a], new_logprobs=step, new_prompt_logprobs=chunks[1])
    ).request_outputs
    (second,) = frontend.feed(out("r", [a], new_logprobs=step)).request_outputs
    prompt = first.prompt_logprobs
    assert prompt[0] is None
    assert [(t, e.logprob, e.rank) for d in prompt[1:] for t, e in d.items()] == [
        (b, -1.0, 1),
        (a, -2.0, 3),
    ]
    assert second.prompt_logprobs is None
    assert [len(o.outputs[0].logprobs) for o in (first, second)] == [1, 1]
    assert second.outputs[0].cumulative_logprob == -0.5


def test_without_a_tokenizer_there_are_tokens_and_no_text(config, info):
    frontend = Frontend(config, info, None)
    frontend.add(prompt=[1, 2], logprobs=0, output_kind=FINAL_ONLY)
    step = [PositionLogprobs([5], [-1.0], 1)]
    end = out("r", [5], new_logprobs=step, finish_reason=FinishReason.LENGTH)
    answer = frontend.feed(end).request_outputs[0].outputs[0]
    assert (answer.text, answer.token_ids) == ("", [5])
    assert answer.logprobs[0][5].decoded_token is None


def test_metrics_and_cached_tokens_are_of_the_whole_request(frontend):
    frontend.add(n=2, output_kind=FINAL_ONLY)
    for i, (queued, last) in enumerate([(10.0, 15.0), (11.0, 19.0)]):
        stats = RequestStats(
            queued_ts=queued, scheduled_ts=12.0, first_token_ts=13.0, last_token_ts=last
        )
        end = FinishReason.LENGTH
        processed = frontend.feed(
            out(f"{i}_r", [5], stats=stats, num_cached_tokens=32 * i, finish_reason=end)
        )
    (output,) = processed.request_outputs
    metrics = output.metrics
    assert (metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts) == (10.0, 12.0, 13.0)
    assert metrics.last_token_ts == 19.0
    assert math.isfinite(metrics.first_token_latency) and metrics.first_token_latency > 0
    assert metrics.num_generation_tokens == 2
    assert output.num_cached_tokens == 0  # the first answer's; the second shares its blocks


def test_end_of_one_of_many_answers_costs_the_same_as_of_few(frontend):
    def calls_to_end(n):
        """How often Python enters a function, or goes on in a generator, for each of n answers."""
        processed = frontend.add(f"of {n}", n=n, max_tokens=1, output_kind=FINAL_ONLY)
        stats = RequestStats(scheduled_ts=12.0, first_token_ts=13.0, last_token_ts=13.0)
        outputs = [
            out(one.request_id, [5], stats=stats, finish_reason=FinishReason.LENGTH)
            for one in processed.requests
        ]
        num_calls = 0

        def count(frame, event, argument):
            nonlocal num_calls
            num_calls += event == "call"

        sys.setprofile(count)
        try:
            for one in outputs[:-1]:
                frontend.feed(one)
        finally:
            sys.setprofile(None)
        (output,) = frontend.feed(outputs[-1]).request_outputs
        assert output.finished and output.metrics.last_token_ts == 13.0
        return num_calls / (n - 1)

    calls_to_end(4)  # what is done once
    assert calls_to_end(1024) < 1.5 * calls_to_end(16)


def test_what_is_told_of_an_end_covers_all_answers_whenever_they_ended(frontend):
    frontend.add(n=3, output_kind=DELTA, max_tokens=9)
    stats = RequestStats(scheduled_ts=12.0, first_token_ts=13.0, last_token_ts=13.0, replica=1)
    frontend.feed(out("0_r", [5, 6], stats=stats, finish_reason=FinishReason.LENGTH))
    frontend.feed(out("1_r", [5], finish_reason=FinishReason.ERROR, error="no memory"))
    frontend.feed(out("2_r", [5]))
    assert not frontend.ended
    frontend.feed(out("2_r", [6, 7], finish_reason=FinishReason.STOP))
    (request,) = frontend.ended
    assert request.request_id == "r" and request.params.max_tokens == 9
    assert request.num_generation_tokens == [2, 1, 3]
    assert request.finish_reasons == ["length", "error", "stop"]
    assert request.errors == ["no memory"]
    assert request.times.replica == 1
    assert request.e2e_s > 0


def test_the_end_of_an_aborted_request_is_told_once_and_is_now(frontend):
    frontend.add(output_kind=DELTA)
    stats = RequestStats(scheduled_ts=0.5, first_token_ts=1.0, last_token_ts=1.0)
    frontend.feed(out("r", [5], stats=stats))
    frontend.output.abort("r")
    frontend.output.abort("r")
    (request,) = frontend.ended
    assert request.finish_reasons == ["abort"] and request.num_generation_tokens == [1]
    assert request.decode_s > 0
