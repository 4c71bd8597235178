"""Stored responses: what a later request may go on after, or read again.

They are in an SQLite database, in memory or in a file that several processes share. What was used
longest ago goes when there is too much.
"""

import sqlite3
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jaxllm.errors import ValidationError
from jaxllm.openai.database import Database
from jaxllm.openai.errors import NotFoundError

IN_MEMORY = "memory"
_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, used REAL NOT NULL, size INTEGER NOT NULL,
    response BLOB NOT NULL, before BLOB NOT NULL, output BLOB NOT NULL
)
"""


_JSON = "CAST(response AS TEXT)"
_STATUS = f"json_extract({_JSON}, '$.status')"


class _Status(msgspec.Struct):
    """What is read of a stored response here."""

    status: str
    background: bool = False


class Stored(NamedTuple):
    """A response as JSON, and the items that a request after it begins with."""

    response: bytes
    before: list[Any]  # the items of the request, and those before it
    output: list[Any]

    @property
    def is_in_progress(self) -> bool:
        return msgspec.json.decode(self.response, type=_Status).status == "in_progress"

    @property
    def is_background(self) -> bool:
        return msgspec.json.decode(self.response, type=_Status).background


class ResponseStore:
    """The stored responses of a server. Any thread may use it."""

    def __init__(self, place: str, max_bytes: int):
        """Open the store in a file, or in this process's memory."""
        path = None if place == IN_MEMORY else Path(place).expanduser()
        try:
            self._db = Database(path, _TABLE)
        except sqlite3.Error as error:
            raise ValidationError(f"response_store={place!r}: {error}") from error
        self._max_bytes = max_bytes

    def put(self, response_id: str, response: msgspec.Struct, before: list[Any]) -> None:
        """Store a response; drop those used longest ago if there is too much."""
        whole = msgspec.json.encode(response)
        output = msgspec.json.encode(msgspec.to_builtins(response)["output"])
        items = msgspec.json.encode(before)
        size = len(whole) + len(output) + len(items)
        row = (response_id, time.time(), size, whole, items, output)
        with self._db.transaction() as db:
            db.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
            (total,) = db.execute("SELECT TOTAL(size) FROM responses").fetchone()
            while total > self._max_bytes:
                oldest = db.execute("SELECT id, size FROM responses ORDER BY used LIMIT 1")
                name, size = oldest.fetchone()
                db.execute("DELETE FROM responses WHERE id = ?", (name,))
                total -= size

    def end(self, response_id: str, response: msgspec.Struct) -> None:
        """Replace a response that is in progress. One that was cancelled or deleted stays so."""
        whole = msgspec.json.encode(response)
        output = msgspec.json.encode(msgspec.to_builtins(response)["output"])
        with self._db.transaction() as db:
            db.execute(
                "UPDATE responses SET response = ?, output = ?, "
                "size = size - length(response) - length(output) + ? "
                f"WHERE id = ? AND {_STATUS} = 'in_progress'",
                (whole, output, len(whole) + len(output), response_id),
            )

    def cancel(self, response_id: str) -> None:
        """Say of a response in progress that it was cancelled."""
        with self._db.transaction() as db:
            db.execute(
                f"UPDATE responses SET response = CAST(json_set({_JSON}, '$.status', 'cancelled') "
                f"AS BLOB) WHERE id = ? AND {_STATUS} = 'in_progress'",
                (response_id,),
            )

    def end_lost(self) -> None:
        """Say of responses in progress that they failed: the server that made them has ended."""
        error = '{"code": "server_error", "message": "the server was restarted"}'
        with self._db.transaction() as db:
            db.execute(
                f"UPDATE responses SET response = CAST(json_set({_JSON}, '$.status', 'failed', "
                f"'$.error', json(?)) AS BLOB) WHERE {_STATUS} = 'in_progress'",
                (error,),
            )

    def get(self, response_id: str, field: str) -> Stored:
        """Find a response; raise NotFoundError, which names the field of the request."""
        with self._db.transaction() as db:
            found = db.execute(
                "UPDATE responses SET used = ? WHERE id = ? RETURNING response, before, output",
                (time.time(), response_id),
            ).fetchone()
        if found is None:
            raise _not_found(response_id, field)
        whole, before, output = found
        return Stored(whole, msgspec.json.decode(before), msgspec.json.decode(output))

    def delete(self, response_id: str, field: str) -> None:
        with self._db.transaction() as db:
            found = db.execute("DELETE FROM responses WHERE id = ?", (response_id,))
            if not found.rowcount:
                raise _not_found(response_id, field)

    def close(self) -> None:
        self._db.close()


def _not_found(response_id: str, field: str) -> NotFoundError:
    return NotFoundError(
        f"{field}={response_id!r:.80}: there is no such response; it was not stored, was deleted, "
        "or was dropped for newer ones",
        parameter=field,
    )
