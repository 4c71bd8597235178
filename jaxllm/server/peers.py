"""The frontends of one engine, as each of them sees the others.

They share the counts that limits need, in a small memory-mapped file. Each frontend writes only its
own counts and reads all, so they need no lock. Other data they request from each other over sockets
in a folder that only this user may enter.
"""

import asyncio
import mmap
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

NUM_COUNTS = 3  # answers, tokens, bytes
_BYTES = 8
# The longest time that a busy frontend may take to answer the others.
_ASK_TIMEOUT_S = 5.0


class Peers:
    """One of `num` frontends, and its connection to the others."""

    def __init__(self, directory: str, index: int, num: int):
        """Join the others in a folder that the first frontend has prepared."""
        self.index = index
        self.num = num
        # Make the answers to the others: to the question for a report, and to a message.
        self.report: Callable[[], bytes] = bytes
        self.on_told: Callable[[bytes], Awaitable[bytes]] | None = None
        self._directory = Path(directory)
        self._socket: socket.socket | None = None
        if num == 1:
            memory = memoryview(bytearray(NUM_COUNTS * _BYTES))
        else:
            with open(_counts_path(directory), "r+b") as file:
                memory = memoryview(mmap.mmap(file.fileno(), 0))
            # Listen already, so that a question before this frontend serves is answered late.
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(self._socket_path(index))
            self._socket.listen()
        # counts[index * NUM_COUNTS + kind]
        self._counts = memory.cast("q")

    @classmethod
    def first(cls, directory: str, num: int) -> "Peers":
        """Prepare a folder for `num` frontends and return the first."""
        if num > 1:
            _counts_path(directory).write_bytes(bytes(num * NUM_COUNTS * _BYTES))
        return cls(directory, 0, num)

    @classmethod
    def none(cls) -> "Peers":
        """Make the peers of a single frontend."""
        return cls("", 0, 1)

    def count(self, kind: int, num: int) -> int:
        """Change this frontend's count by `num`; return the total of all frontends."""
        self._counts[self.index * NUM_COUNTS + kind] += num
        return self.total(kind)

    def total(self, kind: int) -> int:
        return sum(self._counts[kind::NUM_COUNTS])

    async def listen(self) -> asyncio.Server | None:
        """Begin to answer the others."""
        if self._socket is None:
            return None
        return await asyncio.start_unix_server(self._answer, sock=self._socket)

    async def ask(self) -> list[bytes]:
        """Return the reports of all others; raise OSError if one is gone or does not answer."""
        return await self.tell(b"")

    async def tell(self, message: bytes) -> list[bytes]:
        """Send a message to all others and return their answers; raise OSError as `ask` does."""
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            others = (index for index in range(self.num) if index != self.index)
            return list(await asyncio.gather(*(self._ask(index, message) for index in others)))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            message = await reader.read()
            if not message:
                writer.write(self.report())
            elif self.on_told is not None:
                writer.write(await self.on_told(message))
            await writer.drain()
        finally:
            writer.close()

    async def _ask(self, index: int, message: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self._socket_path(index))
        try:
            writer.write(message)
            writer.write_eof()
            return await reader.read()
        finally:
            writer.close()

    def _socket_path(self, index: int) -> str:
        return str(self._directory / f"frontend-{index}")


def _counts_path(directory: str) -> Path:
    return Path(directory) / "counts"
