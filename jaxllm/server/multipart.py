"""Reads multipart/form-data: the fields of a form, and a file, which is kept on disk.

The whole body goes to a file first, in bounded memory; the parts are found in it afterwards.
"""

import asyncio
import mmap
from collections.abc import Callable
from email.message import Message
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import BinaryIO, NamedTuple

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from jaxllm.errors import ValidationError, refused
from jaxllm.server.errors import Disconnected, HTTPError

# What the other fields and the boundaries may add to the file.
_MAX_FORM_BYTES = 64 << 10
_MAX_PARTS = 16
_CLOSE = {"Connection": "close"}


class Form(NamedTuple):
    """The fields, and the name of the file, whose content is where it was asked for."""

    fields: dict[str, str]
    filename: str


async def read_form(
    scope: Scope, receive: Receive, path: Path, max_bytes: int, timeout_s: float
) -> Form:
    """Read a form with one file, named `file`, and write that to a path."""
    headers = Headers(scope=scope)
    kind = _parsed(f"Content-Type: {headers.get('content-type', '')}")
    boundary = kind.get_boundary()
    if kind.get_content_type() != "multipart/form-data" or not boundary:
        message = f"Content-Type {headers.get('content-type', '')!r:.80} is not supported; use "
        raise HTTPError(
            415,
            "UnsupportedMediaTypeError",
            message + "multipart/form-data with a boundary",
            _CLOSE,
        )
    whole = path.with_name(path.name + ".form")
    try:
        with open(whole, "xb") as file:
            await _spool(receive, file.write, max_bytes, timeout_s)
        return await asyncio.to_thread(_take_apart, whole, path, boundary.encode(), max_bytes)
    finally:
        whole.unlink(missing_ok=True)


async def _spool(
    receive: Receive, write: Callable[[bytes], object], max_bytes: int, timeout_s: float
) -> None:
    size = 0
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                message = await receive()
        except TimeoutError:
            why = f"nothing of the file came for {timeout_s} s"
            raise HTTPError(408, "RequestTimeoutError", why, _CLOSE) from None
        if message["type"] == "http.disconnect":
            raise Disconnected
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes + _MAX_FORM_BYTES:
            raise _too_long(max_bytes)
        await asyncio.to_thread(write, part)
        if not message.get("more_body", False):
            return


def _take_apart(whole: Path, path: Path, boundary: bytes, max_bytes: int) -> Form:
    fields: dict[str, str] = {}
    filename = None
    with open(whole, "rb") as file:
        if whole.stat().st_size == 0:
            raise _malformed("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for start, end in _parts(data, b"--" + boundary):
                head_end = data.find(b"\r\n\r\n", start, end)
                if head_end < 0 or head_end - start > _MAX_FORM_BYTES:
                    raise _malformed("a part has no head")
                head = _parsed(data[start:head_end].decode("utf-8", "replace"))
                name = head.get_param("name", header="content-disposition")
                start = head_end + 4
                if not isinstance(name, str):
                    raise _malformed("a part has no name")
                if name == "file":
                    if filename is not None:
                        raise refused("file", name, "give one file")
                    if end - start > max_bytes:
                        raise _too_long(max_bytes)
                    filename = head.get_filename() or "file"
                    file.seek(start)
                    with open(path, "xb") as target:
                        _copy(file, target, end - start)
                elif end - start > _MAX_FORM_BYTES:
                    raise refused(name, f"{end - start} bytes", "it is too long")
                else:
                    fields[name] = data[start:end].decode("utf-8", "replace")
    if filename is None:
        raise ValidationError("file is missing; send a part of this name", parameter="file")
    return Form(fields, filename)


def _parts(data: mmap.mmap, mark: bytes) -> list[tuple[int, int]]:
    """The places of the parts, each with its head."""
    found = []
    at = data.find(mark)
    if at != 0 and data[max(0, at - 2) : max(0, at)] != b"\r\n":
        raise _malformed("it does not begin with the boundary")
    while True:
        start = at + len(mark)
        if data[start : start + 2] == b"--":
            return found
        if data[start : start + 2] != b"\r\n" or len(found) == _MAX_PARTS:
            raise _malformed("a boundary is followed by something else, or there are too many")
        # A part without a head begins with an empty line, so the break before stays in it.
        at = data.find(b"\r\n" + mark, start)
        if at < 0:
            raise _malformed("it ends within a part")
        found.append((start + 2, at))
        at += 2


def _copy(source: BinaryIO, target: BinaryIO, num_bytes: int) -> None:
    while num_bytes:
        piece = source.read(min(num_bytes, 1 << 20))
        target.write(piece)
        num_bytes -= len(piece)


def _parsed(head: str) -> Message:
    return BytesHeaderParser().parsebytes(head.encode())


def _malformed(why: str) -> ValidationError:
    return ValidationError(f"the body is no multipart/form-data: {why}", parameter="body")


def _too_long(max_bytes: int) -> HTTPError:
    why = f"the file is longer than {max_bytes} bytes (--max-batch-file-bytes)"
    return HTTPError(413, "RequestTooLargeError", why, _CLOSE)
