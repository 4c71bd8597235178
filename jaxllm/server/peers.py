"""The frontends that serve one engine together, as each of them sees the others.

They share what a limit must hold for: how much is under way, in a small file that all have in
memory. Each writes its own numbers and reads everybody's, so that there is no lock to wait for.
Everything else they ask of each other, over a socket in a folder that only this user may enter.
"""

import asyncio
import mmap
import socket
from collections.abc import Callable
from pathlib import Path

NUM_COUNTS = 3  # answers, tokens, bytes
_BYTES = 8
# The longest that one may be too busy to answer the others.
_ASK_TIMEOUT_S = 5.0


class Peers:
    """One of `num` frontends, and the way to the others."""

    def __init__(self, directory: str, index: int, num: int):
        """Join the others in a folder that the first one has made ready."""
        self.index = index
        self.num = num
        self.report: Callable[[], bytes] = bytes  # what the others get when they ask
        self._directory = Path(directory)
        self._socket: socket.socket | None = None
        if num == 1:
            memory = memoryview(bytearray(NUM_COUNTS * _BYTES))
        else:
            with open(_counts_path(directory), "r+b") as file:
                memory = memoryview(mmap.mmap(file.fileno(), 0))
            # Already now: who is asked before it serves answers late, and not never.
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(self._socket_path(index))
            self._socket.listen()
        # counts[index * NUM_COUNTS + kind]
        self._counts = memory.cast("q")

    @classmethod
    def first(cls, directory: str, num: int) -> "Peers":
        """Make a folder ready for so many frontends, and be the first one."""
        if num > 1:
            _counts_path(directory).write_bytes(bytes(num * NUM_COUNTS * _BYTES))
        return cls(directory, 0, num)

    @classmethod
    def none(cls) -> "Peers":
        """Of a frontend that is alone."""
        return cls("", 0, 1)

    def count(self, kind: int, num: int) -> int:
        """So much more of this kind is under way here, or less; returns how much is everywhere."""
        self._counts[self.index * NUM_COUNTS + kind] += num
        return self.total(kind)

    def total(self, kind: int) -> int:
        return sum(self._counts[kind::NUM_COUNTS])

    async def listen(self) -> asyncio.Server | None:
        """From now on the others get answers."""
        if self._socket is None:
            return None
        return await asyncio.start_unix_server(self._answer, sock=self._socket)

    async def ask(self) -> list[bytes]:
        """The reports of all others; raises OSError when one is gone, or silent for long."""
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            others = (index for index in range(self.num) if index != self.index)
            return list(await asyncio.gather(*map(self._ask, others)))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(self.report())
            await writer.drain()
        finally:
            writer.close()

    async def _ask(self, index: int) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self._socket_path(index))
        try:
            return await reader.read()
        finally:
            writer.close()

    def _socket_path(self, index: int) -> str:
        return str(self._directory / f"frontend-{index}")


def _counts_path(directory: str) -> Path:
    return Path(directory) / "counts"
