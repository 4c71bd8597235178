"""The journal: the durable record of finished items.

Results are appended to two files, one for answers and one for errors. `commit` first syncs these.
Then it appends a record for each new result to the journal and syncs the journal. So a record is a
promise: these bytes of that file are the result of that item, and they are on disk. Opening a
journal truncates it at its first damaged record, and the files after the last promised byte.
Results that are lost this way were never promised, and are computed again.

    record:  item u64 | number of bytes u32 | which file u8, 3 zeros | checksum u32

The offset of a result in its file is the sum of the sizes before it. The checksum also covers the
record's index, so that a stale or zeroed block is not taken for a record.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxllm.batch.finished import Finished
from jaxllm.errors import JaxLLMError
from jaxllm.logging import init_logger

logger = init_logger(__name__)

WINDOW = 1 << 20  # the largest distance between the oldest unfinished item and the newest

_RECORD = struct.Struct("<QIB3xI")
_RECORDS_PER_READ = 4096


class Kind(IntEnum):
    """The file that contains a result."""

    ANSWER = 0
    ERROR = 1


class Entry(NamedTuple):
    """An item's result: `size` bytes at `offset` in the file of its kind."""

    item: int
    kind: Kind
    offset: int
    size: int


class Journal:
    """Append-only, for one process at a time. Open it anew after a disk error."""

    def __init__(self, path: Path, answers: Path, errors: Path, *, window: int = WINDOW):
        """Open or create the files, and cut off everything that was not promised."""
        self.finished = Finished(window)
        self.num_results = [0, 0]  # of each kind, committed
        self._buffers: list[list[bytes]] = [[], []]
        self._pending: list[tuple[int, Kind, int]] = []  # item, kind, size; in order of append
        self.num_pending_bytes = 0
        self._path = path
        self._paths = [answers, errors]
        self._file = _open_append(path)
        self._ends = [0, 0]  # bytes promised of each file
        self._num_records = self._read_promises()
        self._file.truncate(self._num_records * _RECORD.size)
        self._results = [self._open_results(kind) for kind in Kind]
        for folder in {path.parent for path in (path, answers, errors)}:
            sync_folder(folder)

    def append(self, item: int, kind: Kind, line: bytes) -> None:
        """Add the result of an item, a line without its end. The next `commit` makes it durable."""
        self.finished.add(item)
        self._buffers[kind].append(line + b"\n")
        self._pending.append((item, kind, len(line) + 1))
        self.num_pending_bytes += len(line) + 1

    def commit(self) -> None:
        """Make all appended results durable. Raise OSError, for example if the disk is full;
        earlier commits are not affected."""
        if not self._pending:
            return
        # Empty the buffers first: after an error nothing may be written twice.
        buffers, self._buffers = self._buffers, [[], []]
        pending, self._pending = self._pending, []
        self.num_pending_bytes = 0
        for file, lines in zip(self._results, buffers, strict=True):
            if lines:
                _write(file, b"".join(lines))
        records = bytearray()
        for place, (item, kind, size) in enumerate(pending, self._num_records):
            records += _encode(place, item, kind, size)
        _write(self._file, bytes(records))
        self._num_records += len(pending)
        for _, kind, size in pending:
            self._ends[kind] += size
            self.num_results[kind] += 1

    def close(self) -> None:
        """Close the files. Uncommitted results are dropped."""
        for file in (*self._results, self._file):
            file.close()

    def _read_promises(self) -> int:
        """Replay the journal; return the number of intact records."""
        count = 0
        for entry in read_journal(self._path):
            self.finished.add(entry.item)
            self._ends[entry.kind] = entry.offset + entry.size
            self.num_results[entry.kind] += 1
            count += 1
        lost = os.fstat(self._file.fileno()).st_size - count * _RECORD.size
        if lost:
            logger.warning("%s: the last %d bytes are torn and are cut off", self._path, lost)
        return count

    def _open_results(self, kind: Kind) -> BinaryIO:
        path, end = self._paths[kind], self._ends[kind]
        file = _open_append(path)
        size = os.fstat(file.fileno()).st_size
        if size < end:
            file.close()
            raise JaxLLMError(
                f"{path} has {size} bytes, but {end} were written to it; it was changed or cut. "
                f"Restore it, or delete it and {self._path.parent} to start anew"
            )
        if size > end:
            file.truncate(end)
        return file


def read_journal(path: Path) -> Iterator[Entry]:
    """Read the intact records of a journal, in the order in which they were written."""
    ends, place = [0, 0], 0
    with open(path, "rb") as file:
        while data := file.read(_RECORD.size * _RECORDS_PER_READ):
            for start in range(0, len(data) - _RECORD.size + 1, _RECORD.size):
                item, size, kind, checksum = _RECORD.unpack_from(data, start)
                body = data[start : start + _RECORD.size - 4]
                if checksum != _checksum(place, body) or kind not in (0, 1):
                    return
                yield Entry(item, Kind(kind), ends[kind], size)
                ends[kind] += size
                place += 1


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encode(place: int, item: int, kind: Kind, size: int) -> bytes:
    body = _RECORD.pack(item, size, kind, 0)[:-4]
    return body + _checksum(place, body).to_bytes(4, "little")


def _checksum(place: int, body: bytes) -> int:
    return zlib.crc32(place.to_bytes(8, "little") + body)


def _open_append(path: Path) -> BinaryIO:
    # Unbuffered, so that the write that meets a disk error raises it.
    return open(path, "ab", buffering=0)


def _write(file: BinaryIO, data: bytes) -> None:
    """Write all data and sync it to disk."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
    os.fsync(file.fileno())
