"""The custom_ids that a batch has had so far, on disk: there may be more than memory has room for.

Made anew by every run, which reads the input from its beginning: nothing here has to last.
"""

import contextlib
import hashlib
import sqlite3
from pathlib import Path


class CustomIds:
    """A set of strings in a scratch file."""

    def __init__(self, path: Path):
        path.unlink(missing_ok=True)
        self._path = path
        # A crash may spoil it: no run reads that of another.
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute("CREATE TABLE ids (hash BLOB PRIMARY KEY) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def add(self, custom_id: str) -> bool:
        """Add one; False if it was there already."""
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        cursor = self._database.execute("INSERT OR IGNORE INTO ids VALUES (?)", (digest,))
        return cursor.rowcount == 1

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._database.close()
        self._path.unlink(missing_ok=True)
