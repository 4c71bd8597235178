"""An SQLite database in memory or in a file, which several threads and processes use."""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

_WAIT_S = 10.0


class Database:
    """One connection. Any thread may use it; a transaction excludes those of all others."""

    def __init__(self, path: Path | None, tables: str):
        """Open the database, or make it; None is this process's memory. Raise sqlite3.Error."""
        if path is not None:
            # Nobody else may read what users have said.
            path.touch(mode=0o600)
        name = ":memory:" if path is None else str(path)
        self._db = sqlite3.connect(
            name, check_same_thread=False, timeout=_WAIT_S, isolation_level=None
        )
        self._lock = threading.Lock()
        if path is not None:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(tables)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def close(self) -> None:
        self._db.close()
