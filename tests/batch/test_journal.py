"""The journal under everything that a kill can do to it."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.batch.delivery import write_ordered
from jaxllm.batch.finished import Finished
from jaxllm.batch.journal import Journal, Kind, read_journal
from jaxllm.errors import JaxLLMError

NUM_ITEMS, WINDOW = 40, 16


class Files:
    """The three files of a journal."""

    def __init__(self, folder: Path):
        self.journal, self.answers, self.errors = (folder / name for name in ("j", "a", "e"))

    def open(self) -> Journal:
        return Journal(self.journal, self.answers, self.errors, window=WINDOW)

    def sizes(self) -> list[int]:
        return [os.path.getsize(path) for path in (self.journal, self.answers, self.errors)]


def result(item: int) -> tuple[Kind, bytes]:
    """Items give results of all sizes, a few of them errors."""
    return Kind(item % 5 == 3), b"%d:" % item + b"x" * (item * 7 % 30)


def append_some(journal: Journal, data: st.DataObject) -> None:
    """Finish some items that have room, in any order."""
    for _ in range(data.draw(st.integers(0, 12))):
        free = [
            item
            for item in range(NUM_ITEMS)
            if item not in journal.finished and journal.finished.has_room(item)
        ]
        if not free:
            return
        item = data.draw(st.sampled_from(free))
        journal.append(item, *result(item))


def cut(path: Path, low: int, data: st.DataObject) -> None:
    """Keep any number of the bytes from `low` on, and perhaps add some that nobody wrote."""
    keep = data.draw(st.integers(low, max(low, os.path.getsize(path))))
    with open(path, "r+b") as file:
        file.truncate(keep)
        file.seek(keep)
        file.write(data.draw(st.sampled_from([b"", b"\0" * 7, b"\0" * 40, b"garbage\n" * 6])))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_torn_each_item_ends_with_one_result(data):
    with tempfile.TemporaryDirectory() as name:
        files = Files(Path(name))
        for _ in range(data.draw(st.integers(0, 6))):
            journal = files.open()
            append_some(journal, data)
            journal.commit()
            promised, kept = files.sizes(), set(read_journal(files.journal))
            append_some(journal, data)
            journal.commit()
            journal.close()
            if data.draw(st.booleans()):
                # Killed while results were written: the journal knows nothing of them yet.
                cut(files.journal, promised[0], data)
                with open(files.journal, "r+b") as file:
                    file.truncate(promised[0])
                cut(files.answers, promised[1], data)
                cut(files.errors, promised[2], data)
            else:
                cut(files.journal, promised[0], data)
            assert kept <= set(read_journal(files.journal))
        journal = files.open()
        for item in range(NUM_ITEMS):
            if item not in journal.finished:
                journal.append(item, *result(item))
        journal.commit()
        assert journal.finished.low == NUM_ITEMS == sum(journal.num_results)
        journal.close()
        assert sorted(entry.item for entry in read_journal(files.journal)) == list(range(NUM_ITEMS))
        for kind, path in ((Kind.ANSWER, files.answers), (Kind.ERROR, files.errors)):
            expected = [result(i)[1] for i in range(NUM_ITEMS) if result(i)[0] == kind]
            assert sorted(path.read_bytes().splitlines()) == sorted(expected)
            ordered = path.with_suffix(".ordered")
            write_ordered(files.journal, kind, path, ordered, NUM_ITEMS)
            assert ordered.read_bytes().splitlines() == expected


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_journal_that_lost_promises_only_forgets(data):
    """A disk that lied about syncing: what the journal still knows is right, the rest is redone."""
    with tempfile.TemporaryDirectory() as name:
        files = Files(Path(name))
        journal = files.open()
        for item in range(WINDOW):
            journal.append(item, *result(item))
        journal.commit()
        journal.close()
        cut(files.journal, data.draw(st.integers(0, files.sizes()[0])), data)
        journal = files.open()
        for item in range(WINDOW):
            if item not in journal.finished:
                journal.append(item, *result(item))
        journal.commit()
        lines = files.answers.read_bytes().splitlines() + files.errors.read_bytes().splitlines()
        assert sorted(lines) == sorted(result(item)[1] for item in range(WINDOW))


def test_what_is_not_committed_is_not_there(tmp_path):
    files = Files(tmp_path)
    journal = files.open()
    journal.append(0, Kind.ANSWER, b"kept")
    journal.commit()
    journal.append(1, Kind.ANSWER, b"dropped")
    journal.close()
    assert 0 in files.open().finished
    assert 1 not in files.open().finished
    assert files.answers.read_bytes() == b"kept\n"


def test_an_item_has_one_result(tmp_path):
    journal = Files(tmp_path).open()
    journal.append(0, Kind.ANSWER, b"x")
    with pytest.raises(ValueError, match="item 0"):
        journal.append(0, Kind.ERROR, b"y")


def test_results_that_were_cut_by_others_are_refused(tmp_path):
    files = Files(tmp_path)
    journal = files.open()
    journal.append(0, Kind.ANSWER, b"some text")
    journal.commit()
    journal.close()
    os.truncate(files.answers, 4)
    with pytest.raises(JaxLLMError, match="has 4 bytes, but 10 were written to it"):
        files.open()


def test_a_full_disk_leaves_what_was_committed(tmp_path):
    files = Files(tmp_path)
    journal = files.open()
    journal.append(0, Kind.ANSWER, b"first")
    journal.commit()
    journal.close()
    kept = files.answers.read_bytes()
    # /dev/full has room for nothing.
    full = Journal(files.journal, files.answers, Path("/dev/full"), window=WINDOW)
    full.append(1, Kind.ANSWER, b"second")
    full.append(2, Kind.ERROR, b"third")
    with pytest.raises(OSError, match="No space left"):
        full.commit()
    full.close()
    journal = files.open()
    assert files.answers.read_bytes() == kept
    assert [item for item in range(3) if item in journal.finished] == [0]
    journal.append(1, Kind.ANSWER, b"second")
    journal.commit()
    assert files.answers.read_bytes() == kept + b"second\n"


def test_only_items_near_the_oldest_unfinished_one_have_room():
    finished = Finished(4)
    for item in (1, 3, 2):
        finished.add(item)
    assert (finished.low, 1 in finished, 0 in finished) == (0, True, False)
    assert not finished.has_room(4)
    finished.add(0)
    assert finished.low == 4
    assert finished.has_room(7)
    assert not finished.has_room(8)
    assert [item for item in range(9) if item in finished] == [0, 1, 2, 3]
