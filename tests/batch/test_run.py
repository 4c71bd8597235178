"""The loop of a batch over a real engine: what is under way, what stops it, what fails."""

import io
import json
import resource
import signal

import pytest

from jaxllm.batch.custom_ids import CustomIds
from jaxllm.batch.input import read_items
from jaxllm.batch.journal import Journal
from jaxllm.batch.lines import LineReader
from jaxllm.batch.progress import Progress
from jaxllm.batch.run import BatchRun, unfinished_items
from jaxllm.batch.signals import StopSignal
from jaxllm.errors import JaxLLMError
from jaxllm.openai.served_model import ServedModel
from tests.stand_in import StandIn

pytestmark = pytest.mark.slow  # the first one compiles

POISON = 300
SAMPLED = {"ignore_eos": True, "max_tokens": 3}


def plain(ids, **fields):
    return {"prompt_token_ids": ids, **SAMPLED, **fields}


class Batch:
    """A batch of lines that can be run several times, as several processes would."""

    def __init__(self, engine, folder):
        self._engine = engine
        self._folder = folder
        self.answers, self.errors = folder / "answers", folder / "errors"
        self.on_read = lambda number: None  # called when a line is read

    def run(self, lines, *, grace_period_s=1000.0):
        journal = Journal(self._folder / "journal", self.answers, self.errors)
        self.journal = journal
        ids = CustomIds(self._folder / "ids")
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        try:
            with StopSignal(grace_period_s) as stop:
                reader, progress = LineReader("test", ids), Progress(len(data), None)
                run = BatchRun(
                    self._engine,
                    ServedModel.of(self._engine),
                    unfinished_items(self._items(data), journal, reader, progress),
                    reader,
                    journal,
                    progress,
                    stop,
                )
                with stop.deferred():
                    return run.run()
        finally:
            ids.close()
            journal.close()

    def _items(self, data):
        for item in read_items(io.BytesIO(data), 1 << 20):
            self.on_read(item.number)
            yield item

    def results(self):
        """By line number: the tokens of an answer, or the message of an error."""
        answers = [json.loads(line) for line in open(self.answers)]
        errors = [json.loads(line) for line in open(self.errors)]
        found = [(one["line"], one["outputs"][0]["token_ids"]) for one in answers]
        found += [(one["line"], one["error"]["message"]) for one in errors]
        assert len(dict(found)) == len(found)
        return dict(found)


@pytest.fixture
def batch(engine, tmp_path):
    return Batch(engine, tmp_path)


@pytest.fixture
def lines():
    return [plain([10 + i % 50, 11, 12 + i % 7]) for i in range(80)]


@pytest.fixture(scope="module")
def expected(engine, tmp_path_factory):
    """The results of those lines when nothing happens."""
    batch = Batch(engine, tmp_path_factory.mktemp("undisturbed"))
    assert batch.run([plain([10 + i % 50, 11, 12 + i % 7]) for i in range(80)])
    return batch.results()


def test_all_lines_are_answered_and_the_engine_is_left_empty(engine, expected):
    assert sorted(expected) == list(range(1, 81))
    assert engine.get_num_unfinished_requests() == 0


def test_what_has_no_seed_is_random_and_yet_the_same_in_every_run(batch, lines, expected):
    assert expected[1] != expected[51]  # the same prompt on two lines
    assert batch.run(lines)
    assert batch.results() == expected


def test_only_a_window_of_the_input_is_under_way(batch, lines, engine):
    ahead = []
    batch.on_read = lambda number: ahead.append(number - len(batch.journal._pending))
    assert batch.run(lines)
    # Three times those that run, the next line, and those that ended in the last step.
    assert max(ahead) <= 4 * engine.info.max_num_seqs + 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_finish_what_is_under_way(batch, lines, expected, signum):
    batch.on_read = lambda number: number == 30 and signal.raise_signal(signum)
    assert not batch.run(lines)
    done = batch.results()
    # The line that was read last had not been started.
    assert sorted(done) == list(range(1, 31))
    batch.on_read = lambda number: None
    assert batch.run(lines)
    assert batch.results() == expected


def test_without_grace_what_is_under_way_is_left_for_the_next_run(batch, lines, expected, engine):
    batch.on_read = lambda number: number == 30 and signal.raise_signal(signal.SIGTERM)
    assert not batch.run(lines, grace_period_s=0)
    assert len(batch.results()) < 30
    assert engine.get_num_unfinished_requests() == 0
    batch.on_read = lambda number: None
    assert batch.run(lines)
    assert batch.results() == expected


def test_a_second_signal_ends_the_grace_period(batch, lines):
    batch.on_read = lambda number: (
        number == 30
        and [
            signal.raise_signal(signal.SIGTERM),
            signal.raise_signal(signal.SIGTERM),
        ]
    )
    assert not batch.run(lines)
    assert len(batch.results()) < 30


def test_a_full_disk_stops_the_run_and_loses_nothing(batch, lines, expected):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_disk(number):
        if number == 20:  # as if there were no more room
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))

    batch.on_read = fill_disk
    try:
        with pytest.raises(JaxLLMError, match="the results cannot be written: .*run the same"):
            batch.run(lines)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    batch.on_read = lambda number: None
    assert batch.run(lines)
    assert batch.results() == expected


@pytest.fixture
def break_engine(engine, monkeypatch):
    """Let the device of the engine fail at some prompts."""
    in_flight = engine._engine.in_flight

    def break_engine(is_bad):
        def fail(schedule):
            if any(is_bad(one.prompt_token_ids) for one in schedule.admissions):
                raise RuntimeError("the device is hot")

        broken = StandIn(in_flight.executor, on_execute=fail)
        monkeypatch.setattr(in_flight, "executor", broken)

    return break_engine


def test_a_request_that_breaks_steps_harms_no_other(batch, lines, expected, break_engine):
    for index in (3, 40):
        lines[index] = plain([POISON])
    break_engine(lambda prompt: POISON in prompt)
    assert batch.run(lines)
    results = batch.results()
    for line in (4, 41):
        assert "could not finish the answer: RuntimeError: the device is hot" in results.pop(line)
    assert results == {line: tokens for line, tokens in expected.items() if line in results}
    assert len(results) == 78


def test_an_engine_that_always_fails_stops_the_run(batch, lines, expected, break_engine):
    break_engine(lambda prompt: True)
    with pytest.raises(JaxLLMError, match="the engine failed at 8 requests in a row"):
        batch.run(lines)
    assert len(batch.results()) == 8


def test_a_bug_in_one_line_is_an_error_of_that_line(batch, lines, engine, monkeypatch):
    process = engine.process_input

    def process_input(request_id, *args, **options):
        if request_id == "batch-5-0":
            raise ZeroDivisionError("secret")
        return process(request_id, *args, **options)

    monkeypatch.setattr(engine, "process_input", process_input)
    assert batch.run(lines)
    assert batch.results()[6] == "internal error; see the log"
    assert len(batch.results()) == 80
