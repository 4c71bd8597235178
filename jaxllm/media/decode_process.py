"""Decodes image files in a process of its own, which can be killed.

`python -m jaxllm.media.decode_process SPEC SECONDS` reads files from standard input, each after its
length, and answers each with its patches, or with the reason why there are none. It is `confined`:
a file may end it, and then the parent starts another.
"""

import struct
import subprocess
import sys
import threading

import msgspec

from jaxllm.confined import killed_after, limit_memory, open_answers, took_too_long
from jaxllm.errors import JaxLLMError
from jaxllm.media.decode import Patches, decode, pillow, to_patches
from jaxllm.media.item import ImageSpec
from jaxllm.media.resizing import UndecodableError

# The most memory that an image may need.
_MEMORY_BYTES = 1 << 30
_TIMEOUT_S = 20.0
_LENGTH = struct.Struct("<q")


class Answer(msgspec.Struct):
    """The patches of an image, or why there are none."""

    rows: int = 0
    columns: int = 0
    pixels: bytes = b""
    error: str | None = None


class DecodeProcess:
    """Runs one decoding process at a time, which the first file starts. Thread-safe: files wait for
    each other."""

    def __init__(self, spec: ImageSpec, timeout_s: float = _TIMEOUT_S):
        self._arguments = [msgspec.json.encode(spec).decode(), str(timeout_s)]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def patches(self, data: bytes) -> Patches:
        """Decode, resize and cut a file; raise UndecodableError."""
        pillow()  # says so here if it is missing
        with self._lock:
            answer = self._ask(data)
        if answer.error is not None:
            raise UndecodableError(answer.error)
        return Patches(answer.rows, answer.columns, answer.pixels)

    def close(self) -> None:
        """Kill the process."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _ask(self, data: bytes) -> Answer:
        if self._is_closed:
            raise JaxLLMError("the engine has been shut down")
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(_LENGTH.pack(len(data)) + data)
            process.stdin.flush()
            length = process.stdout.read(_LENGTH.size)
            answer = process.stdout.read(_LENGTH.unpack(length)[0]) if length else b""
        except BrokenPipeError:
            answer = b""
        if answer:
            return msgspec.msgpack.decode(answer, type=Answer)
        status = process.wait()
        if took_too_long(status):
            return Answer(error="to decode it takes too long")
        return Answer(error="to decode it ends the process that does so")


def main() -> None:
    spec, timeout_s = msgspec.json.decode(sys.argv[1], type=ImageSpec), float(sys.argv[2])
    answers = open_answers()
    pillow().Image.init()  # loads the formats before the clock runs
    limit_memory(_MEMORY_BYTES)
    while length := sys.stdin.buffer.read(_LENGTH.size):
        data = sys.stdin.buffer.read(_LENGTH.unpack(length)[0])
        with killed_after(timeout_s):
            answer = msgspec.msgpack.encode(_answer(data, spec))
        answers.write(_LENGTH.pack(len(answer)) + answer)
        answers.flush()


def _answer(data: bytes, spec: ImageSpec) -> Answer:
    try:
        return Answer(*to_patches(decode(data), spec))
    except UndecodableError as error:
        return Answer(error=str(error))
    except MemoryError:
        return Answer(error="to decode it takes too much memory")


if __name__ == "__main__":
    main()
