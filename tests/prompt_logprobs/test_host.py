import numpy as np
import pytest

from jaxllm.messages import EngineOutput, EngineRequest
from jaxllm.prompt_logprobs.host import PromptLogprobs
from jaxllm.prompt_logprobs.slice import NAME
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.limits import make_limits
from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.schedule import LogprobArrays, Schedule, StepResult


def new_request(request_id: str, prompt: list[int], count: int | None) -> Request:
    params = SamplingParams(prompt_logprobs=count)
    message = EngineRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling_params=params, max_tokens=4, seed=0
    )
    return Request(message)


@pytest.fixture
def feature():
    return PromptLogprobs()


@pytest.fixture
def new(feature):
    """Makes requests that the feature has heard of, with so many tokens computed."""

    def new(request_id, prompt, count=None, computed=0):
        request = new_request(request_id, prompt, count)
        feature.add(request)
        request.num_computed_tokens = computed
        return request

    return new


def drafted(feature, *rows):
    requests, num_tokens = zip(*rows, strict=True)
    return feature.draft(requests, np.array(num_tokens, np.int32))


@pytest.mark.parametrize(
    ("count", "length", "wants"), [(None, 3, False), (0, 3, True), (2, 1, False)]
)
def test_they_are_wanted_from_the_second_token_on(feature, new, count, length, wants):
    request = new("a", [7] * length, count, computed=length)
    assert request.num_cache_bars == wants
    assert (drafted(feature, (request, length)) is not None) is wants


def test_targets_are_the_tokens_that_follow(feature, new):
    other = new("b", [1, 2], computed=2)
    asking = new("a", [10, 11, 12, 13, 14], 1, computed=3)
    its = drafted(feature, (other, 2), (asking, 3))
    assert its.needs_mixed
    assert its.slice["targets"].tolist() == [-1, -1, 11, 12, 13]
    assert its.slice["spans"].tolist() == [[1, 2, 5]]
    assert asking.num_cache_bars == 1
    asking.num_computed_tokens = 5
    its = drafted(feature, (other, 2), (asking, 2))
    assert its.slice["targets"].tolist() == [-1, -1, 14, -1]
    assert its.slice["spans"].tolist() == [[1, 2, 3]]
    # All are on their way.
    assert asking.num_cache_bars == 0
    assert drafted(feature, (other, 2), (asking, 2)) is None


def test_what_is_computed_again_is_not_asked_for_again(feature, new):
    asking = new("a", [10, 11, 12, 13], 1, computed=2)
    drafted(feature, (asking, 2))
    # It was preempted, and computes the same, then more.
    assert drafted(feature, (asking, 2)) is None
    asking.num_computed_tokens = 4
    assert drafted(feature, (asking, 4)).slice["targets"].tolist() == [-1, -1, 13, -1]


def test_who_has_ended_is_forgotten(feature, new):
    feature.drop(new("a", [1, 2, 3], 1))
    feature.drop(new("b", [1, 2, 3]))
    later = new("a", [4, 5, 6], computed=3)  # another request with the same id
    assert drafted(feature, (later, 3)) is None


@pytest.mark.parametrize(
    ("counts", "wants_more", "wants_logits"),
    [([0, 1], 0, False), ([1, 2], 1, False), ([20], 1, False), ([21], 0, True), ([0, 21], 0, True)],
)
def test_a_step_computes_no_more_than_some_row_wants(
    feature, new, counts, wants_more, wants_logits
):
    rows = [(new(str(i), [1, 2], count, computed=1), 1) for i, count in enumerate(counts)]
    rows.append((new("nothing", [1, 2], computed=1), 1))
    its = drafted(feature, *rows)
    assert its.slice["wants_more"] == wants_more
    assert its.wants_logits is wants_logits
    assert {array.dtype for array in its.slice.values()} == {np.dtype(np.int32)}


@pytest.mark.parametrize("chunked", [True, False])
def test_those_that_are_made_of_logits_come_one_at_a_time(feature, new, chunked):
    limits = make_limits(enable_chunked_prefill=chunked, long_prefill_token_threshold=0)
    request, fewer = new("a", [7] * 10, 21), new("b", [7] * 10, 20)

    def granted(request, computed):
        request.num_computed_tokens = computed
        n = 10 - computed
        for limit in (feature.limit, *limits):
            n = limit(request, n, 64)
        return n

    def dispatch(until):
        request.num_computed_tokens = until
        drafted(feature, (request, until))

    assert granted(request, 0) == 1
    dispatch(5)
    assert granted(request, 5) == 1
    # After a preemption, up to where it was; and at once when all are there.
    assert granted(request, 0) == 6
    dispatch(8)
    assert granted(request, 8) == 1
    dispatch(9)
    assert granted(request, 0) == 10
    assert granted(fewer, 0) == 10


ARRAYS = LogprobArrays(
    np.arange(12, dtype=np.int32).reshape(3, 4),
    -np.arange(12, dtype=np.float32).reshape(3, 4),
    np.array([5, 6, 7], np.int32),
    np.array([0.5, 1.5, 2.5], np.float32),
)


def read(feature, rows, spans, arrays=ARRAYS, logits=None):
    one = np.ones(len(rows), np.int32)
    schedule = Schedule(
        step=0, num_decodes=0, slots=one, num_tokens=one, context_lens=one, starts=one,
        samples=one > 0, token_ids=one, block_updates=np.zeros((0, 4), np.int32),
        slices={NAME: {"spans": np.array(spans, np.int32)}},
    )  # fmt: skip
    result = StepResult(one, None, logits, slices={NAME: arrays._asdict()})
    return feature.read(schedule, result, rows)


def test_spans_go_to_their_rows(feature, new):
    rows = [new("a", [7] * 4), new("b", [7] * 4, 0)]
    brought = read(feature, rows, [[1, 1, 3]])
    assert (list(brought.rows), list(brought.corrupted)) == ([1], [])
    output = EngineOutput(request_id="b")
    brought.add_to(output, 1)
    assert [entry.token_ids for entry in output.new_prompt_logprobs] == [[4], [8]]
    assert [entry.rank for entry in output.new_prompt_logprobs] == [6, 7]


def test_more_than_a_step_computes_is_made_of_the_rows_logits(feature, new):
    logits = np.zeros((2, 30), np.float32)
    logits[1, 9] = 3
    brought = read(feature, [None, new("b", [7] * 4, 21)], [[1, 2, 3]], logits=logits)
    (entry,) = brought.rows[1]
    assert entry.token_ids[:3] == [8, 9, 0] and len(entry.token_ids) == 22
    assert entry.logprobs[:3] == [-2.5, 0.5, -2.5]


def test_a_row_is_corrupted_if_one_of_its_positions_is(feature, new):
    logprobs = np.array([[-1.0], [np.nan], [-2.0]], np.float32)
    arrays = LogprobArrays(np.zeros((3, 1), np.int32), logprobs, *ARRAYS[2:])
    rows = [new("a", [7] * 4, 0), new("b", [7] * 4, 0)]
    brought = read(feature, rows, [[0, 0, 1], [1, 2, 3]], arrays)
    assert (list(brought.rows), list(brought.corrupted)) == ([0, 1], [])
    brought = read(feature, rows, [[0, 0, 2], [1, 2, 3]], arrays)
    assert (list(brought.rows), list(brought.corrupted)) == ([1], [0])


def test_nobody_looks_at_rows_that_have_ended_or_started_over(feature, new):
    ended = new("a", [7] * 4, 0)
    ended.status = RequestStatus.FINISHED
    brought = read(feature, [ended, None], [[0, 0, 1], [1, 1, 3]])
    assert (list(brought.rows), list(brought.corrupted)) == ([], [])


def test_who_starts_over_is_asked_again_for_what_no_output_has(feature, new):
    asking = new("a", [10, 11, 12, 13], 1, computed=2)
    first = drafted(feature, (asking, 2)).slice["spans"]
    asking.num_computed_tokens = 4
    assert drafted(feature, (asking, 2)).slice["targets"].tolist() == [13, -1]
    assert asking.num_cache_bars == 0
    output = EngineOutput(request_id="a")
    read(feature, [asking], first).add_to(output, 0)
    assert len(output.new_prompt_logprobs) == 2
    feature.start_over(asking)  # the result of the second step is dropped
    assert asking.num_cache_bars == 1
    again = drafted(feature, (asking, 4)).slice
    assert again["targets"].tolist() == [-1, -1, 13, -1]
    assert asking.num_cache_bars == 0
    read(feature, [asking], again["spans"]).add_to(output, 0)
    feature.start_over(asking)  # outputs have all of them
    assert (asking.num_cache_bars, drafted(feature, (asking, 4))) == (0, None)
