"""The custom_ids of a batch so far. They are on disk, because they may exceed memory.

Every run reads the input from its beginning and makes the set anew, so it need not be durable.
"""

import contextlib
import hashlib
import sqlite3
from pathlib import Path

from jaxllm.errors import JaxLLMError


class CustomIds:
    """A set of strings in a scratch file."""

    def __init__(self, path: Path):
        path.unlink(missing_ok=True)
        self._path = path
        self._database = sqlite3.connect(path, isolation_level=None)
        # A crash may corrupt the file, but no run reads the file of another.
        self._execute("PRAGMA journal_mode = OFF")
        self._execute("PRAGMA synchronous = OFF")
        self._execute("CREATE TABLE ids (hash BLOB PRIMARY KEY) WITHOUT ROWID")
        self._execute("BEGIN")

    def add(self, custom_id: str) -> bool:
        """Add an id; return False if it is there already."""
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        return self._execute("INSERT OR IGNORE INTO ids VALUES (?)", digest).rowcount == 1

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._database.close()
        self._path.unlink(missing_ok=True)

    def _execute(self, statement: str, *values: bytes) -> sqlite3.Cursor:
        try:
            return self._database.execute(statement, values)
        except sqlite3.OperationalError as error:
            raise JaxLLMError(
                f"{self._path} cannot be written: {error}. Results that were written are safe; "
                "make room and run the same command to go on"
            ) from error
