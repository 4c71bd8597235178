"""The library of native kernels: it is built where it can be, once, and only for its owner."""

import dataclasses
import stat

import pytest
from jaxllm_kernels.native.library import NoLibrary, load


def test_it_is_built_once_and_only_for_its_owner(tmp_path, library):
    directory = tmp_path / "deep" / "native"
    # What it is made of is as it was, so XLA knows it already.
    plain = dataclasses.replace(library, of_codes=())
    assert load(directory) == plain
    (path,) = directory.iterdir()
    built_at = path.stat().st_mtime_ns
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert load(directory) == plain
    assert path.stat().st_mtime_ns == built_at
    directory.chmod(0o777)
    assert "others may write" in load(directory).reason
    directory.chmod(0o700)
    path.chmod(0o766)
    assert "others may write" in load(directory).reason


@pytest.mark.parametrize(
    "script, reason",
    [
        (None, "no C++ compiler"),
        ("echo version 1; [ $1 = --version ] || { echo broken >&2; exit 3; }", "broken"),
    ],
)
def test_why_there_is_none_is_told(tmp_path, monkeypatch, script, reason):
    if script is not None:
        compiler = tmp_path / "c++"
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    loaded = load(tmp_path / "native")
    assert isinstance(loaded, NoLibrary) and reason in loaded.reason
