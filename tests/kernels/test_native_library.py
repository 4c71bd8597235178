"""The library of native kernels: it is built where it can be, once, and only for its owner."""

import dataclasses
import shutil
import stat

import jax
import jax.numpy as jnp
import pytest
from jaxllm_kernels.native import library as native_library
from jaxllm_kernels.native.library import _FLAGS, DTYPES, Library, NoLibrary, load


def test_it_is_the_same_wherever_it_is(tmp_path, library, native_kernels_dir):
    # XLA knows it already.
    built = [
        native_kernels_dir / f"{part}-{dtype}-{library.build}.so"
        for part in ("dense", "attention")
        for dtype in DTYPES
    ]
    for path in built:
        shutil.copy2(path, tmp_path)
    tmp_path.chmod(0o700)
    assert load(tmp_path) == dataclasses.replace(library, kv_dtypes=())
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in built}


def test_it_is_built_once_and_only_for_its_owner(tmp_path, library, monkeypatch):
    directory = tmp_path / "deep" / "native"
    # Whatever it is made of, it is built; this takes the compiler the least time.
    monkeypatch.setattr(native_library, "_BASE", (native_library._ROW_SUMS,))
    flags = tuple("-O0" if flag == "-O3" else flag for flag in _FLAGS)
    monkeypatch.setattr(native_library, "_FLAGS", flags)
    loaded = load(directory, ("float32",))
    assert isinstance(loaded, Library) and loaded != library
    (path,) = directory.iterdir()
    assert path.name == f"row-sums-float32-{loaded.build}.so"
    built_at = path.stat().st_mtime_ns
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert load(directory, ("float32",)) == loaded
    assert path.stat().st_mtime_ns == built_at
    directory.chmod(0o777)
    assert "others may write" in load(directory, ("float32",)).reason
    directory.chmod(0o700)
    path.chmod(0o766)
    assert "others may write" in load(directory, ("float32",)).reason


@pytest.mark.parametrize(
    "shapes, dtype, result, attributes, is_refused",
    [
        ([(4, 8)], "float32", (4,), {"of_squares": True}, False),
        ([(4, 8)], "int32", (4,), {"of_squares": True}, True),
        ([(4, 8, 2)], "float32", (4,), {"of_squares": True}, True),
        ([(4, 8)] * 2, "float32", (4,), {"of_squares": True}, True),
        ([], "float32", (4,), {"of_squares": True}, True),
        ([(4, 8)], "float32", (4, 1), {"of_squares": True}, True),
        ([(4, 8)], "float32", (4,), {"of_squares": 2.0}, True),
        ([(4, 8)], "float32", (4,), {"squares": True}, True),
        ([(4, 8)], "float32", (4,), {"of_squares": True, "more": 1.0}, True),
    ],
)
def test_a_call_that_is_not_the_functions_is_refused(
    library, shapes, dtype, result, attributes, is_refused
):
    library.add_row_sums()
    call = jax.ffi.ffi_call(
        library.target("jaxllm_row_sums", jnp.float32), jax.ShapeDtypeStruct(result, jnp.float32)
    )
    operands = [jnp.full(shape, 2, dtype) for shape in shapes]
    if is_refused:
        with pytest.raises(jax.errors.JaxRuntimeError, match="the operands are not"):
            call(*operands, **attributes)
    else:
        assert call(*operands, **attributes).tolist() == [32.0] * 4


def test_without_a_sampler_there_is_all_else(tmp_path, library, monkeypatch):
    monkeypatch.setattr(native_library, "_BASE", ())
    unbuildable = dataclasses.replace(native_library._SAMPLER, source="sampler/none.cc")
    monkeypatch.setattr(native_library, "_SAMPLER", unbuildable)
    loaded = load(tmp_path / "native", ("float32",), with_sampler=True)
    assert isinstance(loaded, Library)
    with pytest.raises(ValueError, match="none.cc"):
        loaded.add_sampler()


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
