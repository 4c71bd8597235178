"""What stands in the place of a file and is none, or is none that anybody can read."""

import os
import socket
import threading
from pathlib import Path

import pytest

from jaxllm.errors import CheckpointError, ValidationError
from jaxllm.files import open_regular, parse_json, read_given_text, read_json


@pytest.mark.parametrize(
    ("data", "defect"),
    [
        (b"", "cannot be read as JSON: Expecting value"),
        (b'{"a": ', "cannot be read as JSON: Expecting value"),
        (b'{"a": "\xff"}', "cannot be read as JSON: 'utf-8' codec"),
        (bytes(range(256)), "cannot be read as JSON"),
        (b"[" * 100_000, "nested deeper than 64 levels"),
        (b'{"a": ' * 100_000, "nested deeper than 64 levels"),
        (b'{"a": ' * 500 + b"1" + b"}" * 500, "nested deeper than 64 levels"),
        (b'{"a": ' + b"1" * 5000 + b"}", "cannot be read as JSON: Exceeds the limit"),
        (b"[1]", "holds a list"),
        (b"NaN", "holds a float"),
        (b" " * 2000, "longer than 1000 bytes"),
    ],
)
def test_what_is_no_json_object_is_refused_by_file_and_defect(data, defect, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=defect) as caught:
        read_json(path, most=1000 if defect.startswith("longer") else 1 << 20)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_json_as_deep_as_is_allowed_is_read():
    assert parse_json("[" * 64 + "]" * 64) is not None
    assert parse_json('{"a": Infinity}') == {"a": float("inf")}  # transformers writes such


def make_pipe(path):
    os.mkfifo(path)


def make_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (make_pipe, "a pipe"),
        (make_socket, "a socket"),
        (Path.mkdir, "a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
    ],
)
def test_what_is_no_regular_file_is_refused_and_not_waited_for(make, kind, tmp_path):
    path = tmp_path / "config.json"
    make(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    for one in (path, link):
        with pytest.raises(CheckpointError, match=f"{one} is {kind}, not a regular file"):
            read_json(one)
        with pytest.raises(CheckpointError, match=f"{one} is {kind}, not a regular file"):
            open_regular(one)


def test_a_link_to_a_file_is_the_file(tmp_path):
    (tmp_path / "blob").write_text('{"a": 1}')
    (tmp_path / "config.json").symlink_to("blob")  # as the hub's cache has it
    assert read_json(tmp_path / "config.json") == {"a": 1}


def test_a_file_of_the_user_may_be_a_pipe_that_somebody_writes_to(tmp_path):
    read_end, write_end = os.pipe()  # what a shell makes of <(...)
    text = "{{ messages }}\n" * 10_000
    writer = threading.Thread(target=lambda: os.fdopen(write_end, "w").write(text))
    writer.start()
    assert read_given_text(f"/dev/fd/{read_end}") == text
    writer.join()
    os.close(read_end)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_pipe, "is a pipe that nobody has written to for 0.01 s"),
        (Path.mkdir, "is a directory, not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, not a file"),
        (lambda path: path.write_bytes(b"\xff"), "not UTF-8"),
        (lambda path: path.write_bytes(b" " * (2 << 20)), "longer than 1048576 bytes"),
        (lambda path: None, "No such file or directory; check the path"),
    ],
)
def test_what_a_user_names_by_mistake_is_refused(make, message, tmp_path):
    make(tmp_path / "keys.txt")
    with pytest.raises(ValidationError, match=message):
        read_given_text(str(tmp_path / "keys.txt"), wait_s=0.01)
