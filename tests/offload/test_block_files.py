"""Files of blocks: what was written is read back, and nothing else is."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxllm import ValidationError
from jaxllm.offload.block_files import BlockFiles

PARTS = [np.arange(24, dtype=np.float32).reshape(2, 3, 4), np.arange(8, dtype=np.int8)]
CONTENT = bytes(range(32))


def content(index):
    return index.to_bytes(32, "big")


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "blocks"


def open_files(directory, identity=b"model", max_bytes=2**20):
    return BlockFiles(directory, identity, max_bytes)


def read(files, group=0, content=CONTENT):
    parts = [np.zeros_like(part) for part in PARTS]
    return parts if files.read(group, content, parts) else None


def test_a_block_survives_its_process(directory):
    open_files(directory).write(0, CONTENT, PARTS)
    files = open_files(directory)
    assert files.has(0, CONTENT)
    for got, wanted in zip(read(files), PARTS, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert not files.has(1, CONTENT) and read(files, group=1) is None
    assert not files.has(0, content(1)) and read(files, content=content(1)) is None


def test_a_block_that_is_computed_again_replaces_a_file_that_nobody_has_read(directory):
    open_files(directory).write(0, CONTENT, PARTS)
    others = [part + 1 for part in PARTS]
    again = open_files(directory)
    again.write(0, CONTENT, others)
    assert again.has(0, CONTENT)
    for files in (again, open_files(directory)):
        for got, wanted in zip(read(files), others, strict=True):
            np.testing.assert_array_equal(got, wanted)
    # What was written or read here is what is there.
    files.write(0, CONTENT, PARTS)
    np.testing.assert_array_equal(read(files)[0], others[0])


@pytest.mark.parametrize("change", ["a bit", "its end", "all", "more"])
def test_a_damaged_file_is_a_miss(directory, change):
    open_files(directory).write(0, CONTENT, PARTS)
    [path] = directory.iterdir()
    data = bytearray(path.read_bytes())
    if change == "a bit":
        data[len(data) // 2] ^= 4
    data = {"its end": data[:-1], "all": b"", "more": data + b"x"}.get(change, data)
    path.write_bytes(data)
    files = open_files(directory)
    assert read(files) is None
    assert not files.has(0, CONTENT) and not path.exists()


def test_files_of_another_model_are_not_found(directory):
    open_files(directory, b"model").write(0, CONTENT, PARTS)
    files = open_files(directory, b"other")
    assert not files.has(0, CONTENT)
    [path] = directory.iterdir()
    path.rename(directory / files._name(0, CONTENT))  # nor under their name
    files = open_files(directory, b"other")
    assert files.has(0, CONTENT) and read(files) is None


def test_a_link_or_a_pipe_is_a_miss(directory, tmp_path):
    files = open_files(directory)
    files.write(0, CONTENT, PARTS)
    [path] = directory.iterdir()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert read(files) is None and not path.is_symlink()
    files.write(0, CONTENT, PARTS)
    path.unlink()
    os.mkfifo(path)
    assert read(files) is None and not path.exists()


def test_the_directory_is_private(directory):
    open_files(directory).write(0, CONTENT, PARTS)
    [path] = directory.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o600
    directory.chmod(0o755)
    with pytest.raises(ValidationError, match="kv_offloading_path=.*chmod 700"):
        open_files(directory)


def test_the_least_recently_used_files_give_way(directory):
    files = open_files(directory)
    files.write(0, content(0), PARTS)
    [path] = directory.iterdir()
    size = path.stat().st_size
    files = open_files(directory, max_bytes=3 * size)
    for index in (1, 2):
        files.write(0, content(index), PARTS)
    assert read(files, content=content(0)) is not None
    files.write(0, content(3), PARTS)
    assert [files.has(0, content(index)) for index in range(4)] == [True, False, True, True]
    # Files of other models count too, and a smaller limit holds from the start on.
    assert sum(path.stat().st_size for path in directory.iterdir()) == 3 * size
    open_files(directory, b"other", max_bytes=size)
    assert len(list(directory.iterdir())) == 1


def test_what_is_removed_is_not_found(directory):
    files = open_files(directory)
    files.write(0, CONTENT, PARTS)
    files.bar(0, CONTENT)
    assert not files.has(0, CONTENT)
    files.remove(0, CONTENT)
    assert not list(directory.iterdir())
    files.write(0, CONTENT, PARTS)
    assert files.has(0, CONTENT)
    files.remove_all()
    assert not files.has(0, CONTENT) and not list(directory.iterdir())


def test_it_reports_which_blocks_get_and_lose_files(directory):
    """Of its own identity, and what has been there before."""
    files = open_files(directory)
    assert not files.take_changes()
    files.write(0, CONTENT, PARTS)
    open_files(directory, b"other").write(0, content(7), PARTS)
    assert not files.take_changes()  # nobody follows
    [size] = {path.stat().st_size for path in directory.iterdir()}
    (directory / f"{files._own}-strange.kv").touch()
    files = open_files(directory, max_bytes=4 * size)
    assert files.follow() == [(0, CONTENT)]
    files.write(1, content(1), PARTS)
    files.write(0, content(2), PARTS)
    files.bar(0, content(2))
    files.remove(0, content(2))
    assert files.take_changes() == {(1, content(1)): True, (0, content(2)): False}
    assert not files.take_changes()
    files.write(1, content(1), PARTS)  # it is there
    assert not files.take_changes()
    for index in range(3, 6):  # the oldest give way, also those of others
        files.write(0, content(index), PARTS)
    assert files.take_changes() == {(0, content(index)): True for index in (3, 4, 5)} | {
        (0, CONTENT): False
    }
    files.remove_all()
    lost = files.take_changes()
    assert set(lost.values()) == {False} and len(lost) == 4


def test_a_file_that_could_not_be_removed_is_a_miss(directory, monkeypatch):
    files = open_files(directory)
    files.write(0, CONTENT, PARTS)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path: (_ for _ in ()).throw(PermissionError()))
        files.remove_all()
    assert list(directory.iterdir()) and read(files) is None


def test_a_directory_that_cannot_be_written_costs_only_the_files(directory, monkeypatch):
    files = open_files(directory)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    files.write(0, CONTENT, PARTS)
    assert not files.has(0, CONTENT) and not list(directory.iterdir())


WRITER = """
import sys, pathlib, numpy as np
from jaxllm.offload.block_files import BlockFiles
files = BlockFiles(pathlib.Path(sys.argv[1]), b"model", 2**30)
index = 0
while True:
    files.write(0, index.to_bytes(32, "big"), [np.full(200_000, index, np.int32)])
    index += 1
    print(index, flush=True)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_a_good_directory(directory):
    command = [sys.executable, "-c", WRITER, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        for _ in range(20):
            process.stdout.readline()
        time.sleep(0.003)  # so that it is in the midst of a file
        process.send_signal(signal.SIGKILL)
    files = open_files(directory, max_bytes=2**30)
    complete = [path for path in directory.iterdir() if path.suffix == ".kv"]
    assert len(complete) >= 20
    for index in range(len(complete)):
        part = np.zeros(200_000, np.int32)
        assert files.read(0, content(index), [part]) and (part == index).all()
