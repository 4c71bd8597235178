"""The store of files and batches: lists in pieces, owners, limits."""

import sqlite3

import pytest

from jaxllm.errors import ValidationError
from jaxllm.openai.batches.objects import BatchBody
from jaxllm.openai.batches.store import BatchLimits, BatchStore, Page
from jaxllm.openai.database import Database
from jaxllm.openai.errors import NotFoundError

BODY = {"endpoint": "/v1/completions", "completion_window": "24h"}


@pytest.fixture
def store(tmp_path):
    store = BatchStore(str(tmp_path / "store"), BatchLimits(max_bytes=40, max_batches=2))
    yield store
    store.close()


def add(store, owner="me", content=b"{}"):
    path = store.new_path()
    path.write_bytes(content)
    return store.add_file(owner, "in.jsonl", path)


def begin(store, file, owner="me"):
    return store.add_batch(owner, BatchBody.read(BODY | {"input_file_id": file.id}))


def test_lists_come_in_pieces(store):
    ids = [add(store).id for _ in range(5)]
    add(store, "other")
    seen, page = [], Page(2)
    while True:
        files, has_more = store.files("me", page, "batch")
        seen += [one.id for one in files]
        if not has_more:
            break
        page = Page(2, seen[-1])
    assert seen == ids[::-1]
    files, has_more = store.files("me", Page(4, ids[0], is_ascending=True), None)
    assert ([one.id for one in files], has_more) == (ids[1:], False)
    assert store.files("me", Page(), "batch_output") == ([], False)
    with pytest.raises(NotFoundError, match="after='file-none'"):
        store.files("me", Page(2, "file-none"), None)


def test_files_and_batches_are_limited(store):
    file = add(store, content=b"x" * 30)
    with pytest.raises(ValidationError, match="--batch-dir-bytes"):
        add(store, content=b"x" * 11)
    begin(store, file)
    first = begin(store, file)
    with pytest.raises(ValidationError, match="--max-batches"):
        begin(store, file)
    with pytest.raises(ValidationError, match=f"file_id='{file.id}'"):
        store.delete_file("me", file.id)
    store.cancel("me", first.id)
    store.change(first.id, status="cancelled")
    begin(store, file)
    assert store.cancel("me", first.id).status == "cancelled"
    assert [one.status for _, one in store.unfinished()] == ["validating"] * 2


def test_a_batch_that_was_cancelled_meanwhile_does_not_begin(store):
    batch = begin(store, add(store))
    store.cancel("me", batch.id)
    changed = store.change(batch.id, unless="cancelling", status="in_progress", in_progress_at=5)
    assert (changed.status, changed.in_progress_at) == ("cancelling", 5)


def test_results_are_files_of_the_same_owner(store, tmp_path):
    batch = begin(store, add(store))
    store.folder(batch).mkdir()
    outputs = [store.folder(batch) / name for name in ("answers.jsonl", "errors.jsonl")]
    outputs[0].write_text("{}\n")
    outputs[1].touch()
    (store.folder(batch) / "journal").touch()
    done = store.finish("me", batch.id, outputs, status="completed", completed_at=7)
    store.remove_journal(done)
    assert (done.error_file_id, done.completed_at) == (None, 7)
    file, path = store.file("me", done.output_file_id)
    assert (file.purpose, path.read_text()) == ("batch_output", "{}\n")
    with pytest.raises(NotFoundError):
        store.file("other", file.id)
    assert list(store.folder(batch).iterdir()) == [outputs[0]]
    # Another process sees the same.
    again = BatchStore(str(tmp_path / "store"), BatchLimits(40, 2))
    assert again.batch("me", batch.id) == done


def test_a_transaction_that_fails_leaves_nothing_and_hinders_nobody(tmp_path):
    database = Database(tmp_path / "a.db", "CREATE TABLE IF NOT EXISTS a (n INTEGER UNIQUE)")
    with pytest.raises(sqlite3.IntegrityError):
        with database.transaction() as db:
            db.execute("INSERT INTO a VALUES (1)")
            db.execute("INSERT INTO a VALUES (1)")
    with database.transaction() as db:
        db.execute("INSERT INTO a VALUES (1)")
    other = Database(tmp_path / "a.db", "CREATE TABLE IF NOT EXISTS a (n INTEGER UNIQUE)")
    with other.transaction() as db:
        assert db.execute("SELECT n FROM a").fetchall() == [(1,)]


def test_a_directory_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValidationError, match="batch_dir="):
        BatchStore(str(tmp_path / "file"), BatchLimits(1, 1))
