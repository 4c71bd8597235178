"""Decodes files of images and videos in a process of its own, which can be killed.

`python -m jaxllm.media.decode_process SPEC SECONDS` reads work from standard input, each
piece after its length, and answers each with patches, or with the reason why there are none. It is
`confined`: a file may end it, and then the parent starts another.
"""

import contextlib
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Literal

import msgspec

from jaxllm.confined import killed_after, limit_memory, open_answers, took_too_long
from jaxllm.errors import JaxLLMError, ValidationError
from jaxllm.media.decode import Patches, decode, pillow, to_clip, to_patches
from jaxllm.media.decode_video import decode_video, pyav
from jaxllm.media.frames import Clip, Room, Times
from jaxllm.media.item import ImageSpec
from jaxllm.media.resizing import UndecodableError

# The most memory that an image or a video may need with all copies of its patches.
_MEMORY_BYTES = 1 << 30
_MEMORY_BYTES_OF_VIDEOS = 2 << 30
_TIMEOUT_S = 20.0
_LONGER = 3  # so many times longer a video may take
_LENGTH = struct.Struct("<q")


class Work(msgspec.Struct):
    """What is to be decoded: a file, or the files of a video's frames and their times."""

    kind: Literal["image", "video", "frames"]
    files: Sequence[bytes]
    room: Room | None = None
    times: Times | None = None


class Answer(msgspec.Struct):
    """The patches of an image or a video, or why there are none."""

    image: Patches | None = None
    clip: Clip | None = None
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
        """Decode, resize and cut an image file; raise UndecodableError."""
        found = self._answer(Work("image", [data])).image
        assert found is not None, "there is a reason otherwise"
        return found

    def video(self, data: bytes, room: Room) -> Clip:
        """Decode a video file, unless it has too many tokens; raise UndecodableError."""
        pyav()  # says so here if it is missing
        return self._clip(Work("video", [data], room))

    def frames(self, files: Sequence[bytes], times: Times, room: Room) -> Clip:
        """Decode image files as the frames of a video; raise UndecodableError."""
        return self._clip(Work("frames", files, room, times))

    def _clip(self, work: Work) -> Clip:
        found = self._answer(work).clip
        assert found is not None, "there is a reason otherwise"
        return found

    def _answer(self, work: Work) -> Answer:
        pillow()  # says so here if it is missing
        with self._lock:
            answer = self._ask(msgspec.msgpack.encode(work))
        if answer.error is not None:
            raise UndecodableError(answer.error)
        return answer

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
    if spec.video is not None:
        with contextlib.suppress(ValidationError):
            pyav()
    limit_memory(_MEMORY_BYTES if spec.video is None else _MEMORY_BYTES_OF_VIDEOS)
    while length := sys.stdin.buffer.read(_LENGTH.size):
        data = sys.stdin.buffer.read(_LENGTH.unpack(length)[0])
        work = msgspec.msgpack.decode(data, type=Work)
        del data  # a video is long, and memory is limited
        with killed_after(timeout_s if work.kind == "image" else timeout_s * _LONGER):
            answer = _answer(work, spec)
        answers.write(_LENGTH.pack(len(answer)))
        answers.write(answer)
        answers.flush()


def _answer(work: Work, spec: ImageSpec) -> bytes:
    try:
        return msgspec.msgpack.encode(_decoded(work, spec))
    except UndecodableError as error:
        answer = Answer(error=str(error))
    except MemoryError:
        answer = Answer(error="to decode it takes too much memory")
    return msgspec.msgpack.encode(answer)


def _decoded(work: Work, spec: ImageSpec) -> Answer:
    if work.kind == "image":
        return Answer(image=to_patches(decode(work.files[0]), spec))
    assert work.room is not None, "videos come with their room"
    if work.kind == "video":
        return Answer(clip=decode_video(work.files[0], spec, work.room))
    assert work.times is not None, "frames come with their times"
    return Answer(clip=_of_frames(work.files, work.times, spec, work.room))


def _of_frames(files: Sequence[bytes], times: Times, spec: ImageSpec, room: Room) -> Clip:
    first = decode(files[0])
    size, number = (first.height, first.width), len(files)
    images = (decode(data) for data in files)
    return to_clip(images, size, number, times, spec, room)


if __name__ == "__main__":
    main()
