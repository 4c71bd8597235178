"""When requests with a grammar may begin, when masks can be made, and which tokens end requests."""

import threading

import numpy as np
import pytest

from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.schedule import NO_TOKEN, Schedule, StepResult
from jaxllm.structured_output.host import StructuredOutput
from tests.grammars import request

ONES = np.ones(3, np.int32)
ALL = -1  # a word of a mask of any token


class Driver:
    """Takes the part of a scheduler for three requests, the last without a grammar."""

    def __init__(self, vocabulary, grammar):
        self.may_load = threading.Event()
        self.feature = StructuredOutput(self._load, vocabulary.size)
        self._vocabulary = vocabulary
        grammars = (grammar, grammar, None)
        self.rows = [Request(request(str(i), [5, 6], its)) for i, its in enumerate(grammars)]
        for row in self.rows:
            self.feature.add(row)

    def _load(self):
        assert self.may_load.wait(60)
        return self._vocabulary

    def begin(self):
        self.may_load.set()
        while any(row.num_holds for row in self.rows):
            for row in self.feature.ready(wait=True):
                row.num_holds -= 1

    def draft(self):
        """Plan a step in which all rows sample."""
        for row in self.rows:
            row.num_computed_tokens = row.num_tokens
        drafted = self.feature.draft(self.rows, ONES)
        for row in self.rows:
            row.num_tokens += 1
        return drafted

    def read(self, *tokens):
        """Take in what the oldest step has sampled."""
        schedule = Schedule(
            step=0, num_decodes=3, slots=ONES, num_tokens=ONES, starts=ONES, context_lens=ONES,
            samples=ONES > 0, token_ids=ONES, block_updates=np.zeros((0, 4), np.int32),
            late_rows=np.array([0, 1], np.int32), slices={self.feature.name: {}},
        )  # fmt: skip
        ends = self.feature.read(schedule, StepResult(np.array(tokens), None), self.rows)
        for row, token in zip(self.rows, tokens, strict=True):
            row.output_token_ids.append(token)
        return ends


@pytest.fixture
def ids(tokenizer):
    return {letter: tokenizer.token_to_id(letter) for letter in "abc"}


@pytest.fixture
def drive(vocabulary):
    drivers = []

    def drive(grammar):
        drivers.append(Driver(vocabulary, grammar))
        return drivers[-1]

    yield drive
    for driver in drivers:
        driver.may_load.set()
        driver.feature.close()


def legal(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_requests_are_held_until_their_grammar_is_compiled(drive):
    driver = drive("start: /a+/")
    assert [row.num_holds for row in driver.rows] == [1, 1, 0]
    assert list(driver.feature.ready(wait=False)) == []
    driver.begin()
    # A later one finds it compiled.
    late = Request(request("late", [5], "start: /a+/"))
    driver.feature.add(late)
    assert late.num_holds == 0
    assert list(driver.feature.ready(wait=True)) == [], "there is none to wait for"


def test_one_that_has_ended_is_not_waited_for(drive):
    driver = drive("start: /a+/")
    for row in driver.rows:
        row.status = RequestStatus.FINISHED
        driver.feature.drop(row)
    assert list(driver.feature.ready(wait=True)) == []
    assert driver.feature.draft(driver.rows, ONES) is None


def test_masks_wait_for_the_tokens_that_they_depend_on(drive, ids):
    driver = drive("start: /a[bc]/")
    driver.begin()
    drafted = driver.draft()
    assert drafted.late_rows.tolist() == [0, 1] and drafted.slice == {}
    assert [legal(mask) for mask in driver.feature.masks().first] == [[ids["a"]]] * 2
    driver.draft()
    assert not driver.feature.knows_tokens, "the first token is in flight"
    driver.read(ids["a"], ids["a"], 7)
    assert driver.feature.knows_tokens
    wanted = sorted([ids["b"], ids["c"]])
    assert [legal(mask) for mask in driver.feature.masks().first] == [wanted] * 2


def test_rows_that_compute_a_prompt_are_not_late(drive):
    driver = drive("start: /a+/")
    driver.begin()
    for row in driver.rows:
        row.num_computed_tokens = 1
    assert driver.feature.draft(driver.rows, ONES) is None


def test_rows_of_requests_that_have_ended_or_started_over_get_any_token(drive, ids):
    driver = drive("start: /a[bc]/")
    driver.begin()
    driver.draft()
    driver.rows[0].status = RequestStatus.FINISHED
    driver.rows[1].num_tokens = driver.rows[1].num_known_tokens
    assert (driver.feature.masks().first == ALL).all()


def test_tokens_end_requests_alone(drive, ids):
    driver = drive("start: /ab?/")
    driver.begin()
    driver.draft()
    ends = driver.read(ids["a"], ids["c"], ids["c"])
    assert ends.complete == [] and list(ends.failed) == [1]
    assert ends.failed[1].startswith("structured_outputs: ")
    # It may end here, and ends with the last letter that is possible.
    driver.draft()
    assert legal(driver.feature.masks().first[0]) == sorted([0, ids["b"]])
    assert (driver.feature.masks().first[1] == ALL).all()
    assert driver.read(ids["b"], ids["b"], 7).complete == [0]


def test_what_is_read_and_then_dropped_is_forgotten(drive, ids):
    """Another feature may find that the logits of a row are not finite."""
    driver = drive("start: /a[bc]d/")
    driver.begin()
    driver.draft()
    driver.read(ids["a"], ids["a"], 7)
    driver.draft()
    driver.read(ids["b"], ids["c"], 7)
    row = driver.rows[0]
    row.output_token_ids.pop()
    driver.feature.start_over(row)
    row.num_tokens = row.num_known_tokens
    driver.draft()
    first, second = (legal(mask) for mask in driver.feature.masks().first)
    assert first == sorted([ids["b"], ids["c"]]) and second != first


def test_a_row_without_a_token_stays_where_it_is(drive, ids):
    driver = drive("start: /ab?/")
    driver.begin()
    driver.draft()
    before = driver.feature.masks().first
    ends = driver.read(NO_TOKEN, NO_TOKEN, NO_TOKEN)
    assert not ends.failed and not ends.complete
    for row in driver.rows:
        row.output_token_ids.clear()
        row.num_tokens = 2
    driver.draft()
    assert (driver.feature.masks().first == before).all()
