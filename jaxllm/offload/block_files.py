"""Files of blocks: a prefix cache that outlives its process.

A file has one block of one cache group. Its name says whose it is, and its end has a hash of all of
it. It appears under its name when it is complete, so a process that is killed leaves nothing worse
than a temporary file. A file that is damaged, foreign or gone is a miss.

Several processes may share a directory. What another one adds is found at the next start.
"""

import contextlib
import hashlib
import os
import secrets
import stat
import struct
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import refused
from jaxllm.logging import init_logger
from jaxllm.scheduler.schedule import BlockKey

logger = init_logger(__name__)

_MAGIC = b"jaxllm KV block 1\n"
_LENGTH = struct.Struct("<Q")
_HASH_BYTES = 32
_SUFFIX = ".kv"
_TEMPORARY = ".tmp-"
_ABANDONED_S = 600.0  # nobody writes a block for so long


class BlockFiles:
    """The files of one identity: what `identity` hashes must determine the bytes of a block, beside
    its content's hash. All methods but `has` and `bar` are for one thread."""

    def __init__(self, directory: Path, identity: bytes, max_bytes: int):
        self._directory = directory
        self._identity = hashlib.sha256(identity).digest()
        self._own = self._identity[:8].hex()
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()  # all files; the last used last
        self._num_bytes = 0
        self._unread: set[str] = set()  # those found at the start that nobody has read
        self._barred: Counter[str] = Counter()  # names, until their files are removed
        self._changes: dict[BlockKey, bool] | None = None  # whether there is a file now
        # Processes on several hosts, whose numbers may be equal, may share the directory.
        self._temporary = directory / f"{_TEMPORARY}{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._has_failed = False
        make_private(directory)
        self._scan()

    def has(self, group: int, content: bytes) -> bool:
        """Whether there seems to be a file. Any thread may ask."""
        name = self._name(group, content)
        return name in self._sizes and name not in self._barred

    def bar(self, group: int, content: bytes) -> None:
        """Find a content no more until `remove` has removed it. Any thread may call this."""
        with self._lock:
            self._barred[self._name(group, content)] += 1

    def remove(self, group: int, content: bytes) -> None:
        """Remove the file of a content, which was barred."""
        name = self._name(group, content)
        self._drop(name)
        with self._lock:
            self._barred[name] -= 1
            if not self._barred[name]:
                del self._barred[name]

    def follow(self) -> list[BlockKey]:
        """Return the blocks that have files. From now on changes are noted."""
        self._changes = {}
        return [key for name in self._sizes if (key := self._key(name)) is not None]

    def take_changes(self) -> dict[BlockKey, bool]:
        """Return the blocks that have got or lost their files since the last call, and whether
        they have them now."""
        changes = self._changes
        if not changes:
            return {}
        self._changes = {}
        return changes

    def remove_all(self) -> None:
        """Remove the files of this identity."""
        for name in list(self._sizes):
            if name.startswith(self._own):
                self._drop(name)

    def write(self, group: int, content: bytes, parts: Sequence[np.ndarray]) -> None:
        """Write a block, unless there is a file of it. Failures are logged once."""
        name = self._name(group, content)
        if name in self._unread:
            # It was computed again, so that another rank may lack it. What was forgotten there,
            # and not removed here before this process was killed, must not be read beside it.
            self._drop(name)
        if name in self._sizes:
            self._use(name)
            return
        try:
            data = self._encoded(group, content, parts)
            if len(data) > self._max_bytes:
                return
            self._make_room(len(data))
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(self._temporary, flags, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._temporary, self._directory / name)
        except OSError as error:
            if not self._has_failed:
                logger.warning("a KV block cannot be written to %s: %s", self._directory, error)
            self._has_failed = True
            with contextlib.suppress(OSError):
                self._temporary.unlink()
            return
        self._sizes[name] = len(data)
        self._num_bytes += len(data)
        self._note(name, has_file=True)

    def read(self, group: int, content: bytes, parts: Sequence[np.ndarray]) -> bool:
        """Fill the arrays of a block from its file. Return False if it is not there, or not what
        was written."""
        name = self._name(group, content)
        if name not in self._sizes:
            return False  # a file of this name was dropped, and could not be removed
        length = sum(part.nbytes for part in parts)
        head = self._head(group, content, length)
        try:
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(self._directory / name, flags), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError("it is not a regular file")
                data = file.read(len(head) + length + _HASH_BYTES + 1)
        except OSError as error:
            logger.warning("the KV block %s cannot be read: %s", name, error)
            self._drop(name)
            return False
        view = memoryview(data)
        body, digest = view[:-_HASH_BYTES], view[-_HASH_BYTES:]
        if (
            len(body) != len(head) + length
            or body[: len(head)] != head
            or hashlib.blake2b(body, digest_size=_HASH_BYTES).digest() != digest
        ):
            logger.warning("the KV block %s is damaged, and removed", name)
            self._drop(name)
            return False
        first = len(head)
        for part in parts:
            _bytes_of(part)[:] = np.frombuffer(view[first : first + part.nbytes], np.uint8)
            first += part.nbytes
        self._unread.discard(name)
        self._use(name)
        return True

    def _name(self, group: int, content: bytes) -> str:
        return f"{self._own}-{content.hex()}-{group}{_SUFFIX}"

    def _key(self, name: str) -> BlockKey | None:
        """The block of a file of this identity."""
        its, *rest = name.removesuffix(_SUFFIX).split("-")
        if its != self._own or len(rest) != 2:
            return None
        try:
            return int(rest[1]), bytes.fromhex(rest[0])
        except ValueError:
            return None  # another program's

    def _note(self, name: str, *, has_file: bool) -> None:
        if self._changes is not None and (key := self._key(name)) is not None:
            self._changes[key] = has_file

    def _head(self, group: int, content: bytes, length: int) -> bytes:
        return b"".join(
            (_MAGIC, self._identity, content, _LENGTH.pack(group), _LENGTH.pack(length))
        )

    def _encoded(self, group: int, content: bytes, parts: Sequence[np.ndarray]) -> bytes:
        length = sum(part.nbytes for part in parts)
        pieces: list[Any] = [_bytes_of(part) for part in parts]
        body = b"".join([self._head(group, content, length), *pieces])
        return body + hashlib.blake2b(body, digest_size=_HASH_BYTES).digest()

    def _scan(self) -> None:
        """Find the files, of all identities, and remove what a killed process has left."""
        found = []
        for entry in os.scandir(self._directory):
            with contextlib.suppress(OSError):
                its = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(its.st_mode):
                    continue
                if entry.name.endswith(_SUFFIX):
                    found.append((its.st_mtime, entry.name, its.st_size))
                elif entry.name.startswith(_TEMPORARY):
                    if time.time() - its.st_mtime > _ABANDONED_S:
                        os.unlink(entry.path)
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self._num_bytes += size
        self._unread.update(self._sizes)
        self._make_room(0)

    def _make_room(self, num_bytes: int) -> None:
        while self._sizes and self._num_bytes + num_bytes > self._max_bytes:
            self._drop(next(iter(self._sizes)))

    def _use(self, name: str) -> None:
        self._sizes.move_to_end(name)
        with contextlib.suppress(OSError):
            os.utime(self._directory / name)  # the order of the next start

    def _drop(self, name: str) -> None:
        if (size := self._sizes.pop(name, None)) is not None:
            self._num_bytes -= size
            self._unread.discard(name)
            self._note(name, has_file=False)
        with contextlib.suppress(OSError):
            (self._directory / name).unlink()


def _bytes_of(part: np.ndarray) -> np.ndarray:
    """An array's bytes, without a copy."""
    assert part.flags.c_contiguous, "a part of a place is not in one piece"
    return part.reshape(-1).view(np.uint8)


def make_private(directory: Path) -> None:
    """Make the directory. Refuse one that others may read or write: it has users' text."""
    option = "kv_offloading_path"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        its = directory.stat()
    except OSError as error:
        raise refused(option, str(directory), f"{error.strerror}; give another path") from error
    if its.st_uid != os.getuid() or its.st_mode & 0o077:
        raise refused(
            option,
            str(directory),
            "it has users' text, and others may enter it; chmod 700 it, or give a new path",
        )
