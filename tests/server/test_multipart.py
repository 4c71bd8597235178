"""Forms with a file, however their bytes arrive, and bodies that are none."""

import asyncio

import pytest

from jaxllm.errors import ValidationError
from jaxllm.server.errors import Disconnected, HTTPError
from jaxllm.server.multipart import read_form

# A file that looks like the form around it.
CONTENT = b'\r\n--xx\r\n--x\r\n{"a": "\xc3\xa9"}\r\n\r\n-'
FORM = (
    b'--x-y\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x-y\r\nContent-Disposition: form-data; name="file"; filename="a b.jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n" + CONTENT + b"\r\n--x-y--\r\n"
)
FILE = b'--x-y\r\nContent-Disposition: form-data; name="file"\r\n\r\n'


def read(path, *pieces, kind='multipart/form-data; boundary="x-y"', most=1000, ends=True):
    messages = [{"type": "http.request", "body": one, "more_body": True} for one in pieces]
    end = {"type": "http.request", "body": b""} if ends else {"type": "http.disconnect"}
    messages = iter([*messages, end])

    async def receive():
        return next(messages)

    scope = {"type": "http", "headers": [(b"content-type", kind.encode())]}
    return asyncio.run(read_form(scope, receive, path, most, 10))


@pytest.mark.parametrize("size", [1, 7, 64, len(FORM)])
def test_every_split_gives_the_same(tmp_path, size):
    pieces = [FORM[at : at + size] for at in range(0, len(FORM), size)]
    form = read(tmp_path / "file", *pieces)
    assert (form.fields, form.filename) == ({"purpose": "batch"}, "a b.jsonl")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_an_empty_file_is_a_file(tmp_path):
    read(tmp_path / "file", FILE + b"\r\n--x-y--")
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"abc",
        FORM[:-8],
        b"--x-y--",
        b"--x-y\r\n\r\n\r\n--x-y--",
        b"--x-y\r\nno head\r\n--x-y--",
        b"--x-yz\r\n",
        FILE + b"a\r\n" + FILE + b"b\r\n--x-y--",
        (FILE + b"\r\n") * 20 + b"--x-y--",
        b'--x-y\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n--x-y--',
    ],
)
def test_what_is_no_form_is_refused_and_leaves_nothing(tmp_path, body):
    with pytest.raises(ValidationError):
        read(tmp_path / "file", body)
    assert [one.name for one in tmp_path.iterdir() if one.name != "file"] == []


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"kind": "application/json"}, 415),
        ({"kind": "multipart/form-data"}, 415),
        ({"kind": "multipart/mixed; boundary=x-y"}, 415),
        ({"most": len(CONTENT) - 1}, 413),
    ],
)
def test_other_types_and_long_files_are_refused(tmp_path, changes, status):
    with pytest.raises(HTTPError) as caught:
        read(tmp_path / "file", FORM, **changes)
    assert caught.value.status == status
    assert read(tmp_path / "file", FORM, most=len(CONTENT)).filename


def test_a_long_body_is_not_read_to_its_end(tmp_path):
    pieces = [FILE] + [b"x" * 10_000] * 100
    with pytest.raises(HTTPError):
        read(tmp_path / "file", *pieces, most=10)
    with pytest.raises(Disconnected):
        read(tmp_path / "file", FILE, ends=False)
    assert list(tmp_path.iterdir()) == []
