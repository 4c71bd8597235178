"""The files and batches of a server, in one directory: an SQLite database and the files themselves.

    batches.db     what there is, and who owns it
    files/ID       an uploaded file
    batches/ID/    a batch's journal, answers and errors (jaxllm.batch.journal)

Several processes share it. Whatever a key may not see does not exist for its requests.
"""

import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jaxllm.errors import ValidationError, refused
from jaxllm.openai.batches.objects import (
    UNFINISHED,
    WINDOW_S,
    Batch,
    BatchBody,
    BatchError,
    BatchErrors,
    File,
)
from jaxllm.openai.database import Database
from jaxllm.openai.errors import NotFoundError

_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    purpose TEXT NOT NULL, size INTEGER NOT NULL, path TEXT NOT NULL, file BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    status TEXT NOT NULL, input TEXT NOT NULL, batch BLOB NOT NULL
);
"""


class BatchLimits(NamedTuple):
    """What the store takes."""

    max_bytes: int  # of all files
    max_batches: int  # unfinished ones of each owner


class Page(NamedTuple):
    """Which part of a list is asked for."""

    limit: int = 20
    after: str | None = None
    is_ascending: bool = False


class BatchStore:
    """Any thread may use it."""

    def __init__(self, directory: str, limits: BatchLimits):
        self._folder = Path(directory).expanduser()
        self._limits = limits
        try:
            for name in ("files", "batches"):
                (self._folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._db = Database(self._folder / "batches.db", _TABLES)
        except (OSError, sqlite3.Error) as error:
            raise ValidationError(f"batch_dir={directory!r}: {error}") from error

    # ---- files

    def new_path(self) -> Path:
        """A place for a file that is being uploaded."""
        return self._folder / "files" / f"{uuid.uuid4().hex}.part"

    def check_room(self, num_bytes: int) -> None:
        """Refuse a file for which there is no room."""
        with self._db.transaction() as db:
            (total,) = db.execute("SELECT TOTAL(size) FROM files").fetchone()
        if total + num_bytes > self._limits.max_bytes:
            raise refused(
                "file",
                f"{num_bytes} bytes",
                f"the files here have {int(total)} of at most {self._limits.max_bytes} bytes "
                "(--batch-dir-bytes); delete some",
            )

    def add_file(self, owner: str, filename: str, source: Path) -> File:
        """Take in an uploaded file, which is moved."""
        size = source.stat().st_size
        self.check_room(size)
        name = f"file-{uuid.uuid4().hex}"
        path = f"files/{name}"
        file = File(
            id=name, bytes=size, created_at=int(time.time()), filename=filename, purpose="batch"
        )
        os.replace(source, self._folder / path)
        with self._db.transaction() as db:
            _insert_file(db, owner, file, path)
        return file

    def file(self, owner: str, file_id: str, field: str = "file_id") -> tuple[File, Path]:
        """Find a file; raise NotFoundError, which names the field of the request."""
        with self._db.transaction() as db:
            found = db.execute(
                "SELECT file, path FROM files WHERE id = ? AND owner = ?", (file_id, owner)
            ).fetchone()
        if found is None:
            raise _not_found("file", file_id, field)
        return msgspec.json.decode(found[0], type=File), self._folder / found[1]

    def files(self, owner: str, page: Page, purpose: str | None) -> tuple[list[File], bool]:
        """A part of an owner's files, and whether there are more."""
        more = ("", ()) if purpose is None else (" AND purpose = ?", (purpose,))
        rows, has_more = self._list("files", "file", owner, page, *more)
        return [msgspec.json.decode(row, type=File) for row in rows], has_more

    def delete_file(self, owner: str, file_id: str) -> None:
        _, path = self.file(owner, file_id)
        with self._db.transaction() as db:
            marks = ",".join("?" * len(UNFINISHED))
            used = db.execute(
                f"SELECT id FROM batches WHERE input = ? AND status IN ({marks})",
                (file_id, *UNFINISHED),
            ).fetchone()
            if used is not None:
                raise refused("file_id", file_id, f"{used[0]} reads it; cancel that first")
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        path.unlink(missing_ok=True)

    # ---- batches

    def add_batch(self, owner: str, body: BatchBody) -> Batch:
        self.file(owner, body.input_file_id, "input_file_id")
        now = int(time.time())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=body.metadata,
        )
        with self._db.transaction() as db:
            marks = ",".join("?" * len(UNFINISHED))
            (num,) = db.execute(
                f"SELECT COUNT(*) FROM batches WHERE owner = ? AND status IN ({marks})",
                (owner, *UNFINISHED),
            ).fetchone()
            if num >= self._limits.max_batches:
                raise ValidationError(
                    f"there are {num} unfinished batches of this key, and at most "
                    f"{self._limits.max_batches} are allowed (--max-batches); wait for one"
                )
            db.execute(
                "INSERT INTO batches (id, owner, status, input, batch) VALUES (?, ?, ?, ?, ?)",
                (batch.id, owner, batch.status, batch.input_file_id, msgspec.json.encode(batch)),
            )
        return batch

    def batch(self, owner: str, batch_id: str) -> Batch:
        with self._db.transaction() as db:
            found = db.execute(
                "SELECT batch FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
            ).fetchone()
        if found is None:
            raise _not_found("batch", batch_id, "batch_id")
        return msgspec.json.decode(found[0], type=Batch)

    def batches(self, owner: str, page: Page) -> tuple[list[Batch], bool]:
        rows, has_more = self._list("batches", "batch", owner, page)
        return [msgspec.json.decode(row, type=Batch) for row in rows], has_more

    def cancel(self, owner: str, batch_id: str) -> Batch:
        """Ask for the end of a batch. One that has ended stays as it is."""
        batch = self.batch(owner, batch_id)
        if batch.status in ("validating", "in_progress"):
            return self.change(batch_id, status="cancelling", cancelling_at=int(time.time()))
        return batch

    def unfinished(self) -> list[tuple[str, Batch]]:
        """All unfinished batches and their owners, oldest first."""
        marks = ",".join("?" * len(UNFINISHED))
        with self._db.transaction() as db:
            rows = db.execute(
                f"SELECT owner, batch FROM batches WHERE status IN ({marks}) ORDER BY place",
                UNFINISHED,
            ).fetchall()
        return [(owner, msgspec.json.decode(batch, type=Batch)) for owner, batch in rows]

    def folder(self, batch: Batch) -> Path:
        """The folder of a batch's journal and results."""
        return self._folder / "batches" / batch.id

    def change(self, batch_id: str, *, unless: str | None = None, **fields: Any) -> Batch:
        """Change fields of a batch, unless it has this status; return it as it is now."""
        return self._change(batch_id, unless, fields, "", ())

    def fail(self, batch_id: str, code: str, message: str) -> Batch:
        """End a batch without results."""
        errors = BatchErrors(data=[BatchError(code=code, message=message)])
        return self.change(batch_id, status="failed", failed_at=int(time.time()), errors=errors)

    def finish(self, owner: str, batch_id: str, outputs: Sequence[Path], **fields: Any) -> Batch:
        """End a batch with its files of answers and of errors, those that are not empty."""
        made = []
        for kind, path in zip(("output", "error"), outputs, strict=True):
            size = path.stat().st_size if path.exists() else 0
            if not size:
                path.unlink(missing_ok=True)
                continue
            file = File(
                id=f"file-{uuid.uuid4().hex}",
                bytes=size,
                created_at=int(time.time()),
                filename=f"{batch_id}_{kind}.jsonl",
                purpose="batch_output",
            )
            fields[f"{kind}_file_id"] = file.id
            made.append((file, str(path.relative_to(self._folder))))
        return self._change(batch_id, None, fields, owner, made)

    def remove_journal(self, batch: Batch) -> None:
        """Delete what only an unfinished batch needs."""
        for name in ("journal", "custom_ids"):
            (self.folder(batch) / name).unlink(missing_ok=True)
        if self.folder(batch).is_dir() and not any(self.folder(batch).iterdir()):
            shutil.rmtree(self.folder(batch))

    def close(self) -> None:
        self._db.close()

    def _change(
        self,
        batch_id: str,
        unless: str | None,
        fields: dict[str, Any],
        owner: str,
        made: Sequence[tuple[File, str]],
    ) -> Batch:
        with self._db.transaction() as db:
            (found,) = db.execute("SELECT batch FROM batches WHERE id = ?", (batch_id,)).fetchone()
            batch = msgspec.json.decode(found, type=Batch)
            if batch.status == unless:
                fields = {name: value for name, value in fields.items() if name != "status"}
            batch = msgspec.structs.replace(batch, **fields)
            for file, path in made:
                _insert_file(db, owner, file, path)
            db.execute(
                "UPDATE batches SET status = ?, batch = ? WHERE id = ?",
                (batch.status, msgspec.json.encode(batch), batch_id),
            )
        return batch

    def _list(
        self,
        table: str,
        column: str,
        owner: str,
        page: Page,
        where: str = "",
        values: tuple[object, ...] = (),
    ) -> tuple[list[bytes], bool]:
        """Rows of a table, newest first unless the page says otherwise."""
        compare, order = (">", "ASC") if page.is_ascending else ("<", "DESC")
        with self._db.transaction() as db:
            given: tuple[object, ...] = (owner, *values)
            if page.after is not None:
                found = db.execute(
                    f"SELECT place FROM {table} WHERE id = ? AND owner = ?", (page.after, owner)
                ).fetchone()
                if found is None:
                    raise _not_found(column, page.after, "after")
                where += f" AND place {compare} ?"
                given += (found[0],)
            rows = db.execute(
                f"SELECT {column} FROM {table} WHERE owner = ?{where} "
                f"ORDER BY place {order} LIMIT ?",
                (*given, page.limit + 1),
            ).fetchall()
        return [row for (row,) in rows[: page.limit]], len(rows) > page.limit


def _insert_file(db: sqlite3.Connection, owner: str, file: File, path: str) -> None:
    db.execute(
        "INSERT INTO files (id, owner, purpose, size, path, file) VALUES (?, ?, ?, ?, ?, ?)",
        (file.id, owner, file.purpose, file.bytes, path, msgspec.json.encode(file)),
    )


def _not_found(kind: str, name: str, field: str) -> NotFoundError:
    return NotFoundError(f"{field}={name!r:.80}: there is no such {kind}", parameter=field)
