"""Fixtures for tests of several kernels."""

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from jaxllm_kernels.compat import why_no_mosaic_gpu
from jaxllm_kernels.native import library as native_library
from jaxllm_kernels.native.library import _FLAGS, KV_DTYPES, Library, load
from jaxllm_kernels.platform import Chip, chip_of, processor

from tests.emulator import improve_the_emulator
from tests.kernels.sass import tools_dir

improve_the_emulator()
if not why_no_mosaic_gpu():
    # The interpreter of GPUs imports it, after which JAX traces anew what it had traced before.
    import jax.experimental.pallas.tpu  # noqa: F401


@pytest.fixture
def gpu() -> Chip:
    """The GPU that JAX computes on."""
    chip = chip_of(jax.devices()[0])
    if chip.platform != "gpu":
        pytest.skip(f"needs a GPU, and this is a {chip.name}")
    return chip


@pytest.fixture
def no_races():
    """After a test, that the emulator of TPUs has found none."""
    from jax.experimental.pallas import tpu as pltpu

    yield
    # Where the interpreter keeps its findings; there is no public name.
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    races = interpret_pallas_call.races
    assert races is not None and not races.races_found
    pltpu.reset_tpu_interpret_mode_state()


# Compilers' names of processors with narrower registers or fewer instructions, and the features
# that this processor needs to run their code.
OTHER_PROCESSORS = {
    "x86-64": {"sse2"},
    "x86-64-v3": {"avx2", "bmi2", "fma"},
    "skylake-avx512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}


@pytest.fixture(scope="session")
def library(native_kernels_dir):
    """The library of native kernels."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler is here")
    loaded = load(native_kernels_dir, kv_dtypes=KV_DTYPES)
    assert isinstance(loaded, Library), loaded
    loaded.add_experts()
    return loaded


# A build whose AVX-512 instructions are functions that do the same.
MODELLED = "modelled AVX-512"
OTHER_BUILDS = ("x86-64", MODELLED)


@pytest.fixture(
    scope="session",
    params=["native", *(pytest.param(name, marks=pytest.mark.sweep) for name in OTHER_BUILDS)],
)
def library_for_codes(request, library, native_kernels_dir):
    """Functions for codes as built for each kind of processor. Other kinds are built quickly, and
    for 16 bits."""
    if request.param == "native":
        return library
    flags = [flag for flag in _FLAGS if flag not in ("-O3", "-march=native")]
    if request.param == "x86-64":
        needs, flags = {"sse2"}, ["-O1", "-march=x86-64", *flags]
    else:
        needs = OTHER_PROCESSORS["x86-64-v3"] | {"f16c"}
        model = str(Path(__file__).with_name("avx512_model.h"))
        flags = ["-O1", "-march=x86-64-v3", "-include", model, *flags]
    if not needs <= set(processor().split()):
        pytest.skip(f"this processor runs no code for {request.param}")
    build = f"{library.build}-{request.param.replace(' ', '-')}"
    return replace(library, build=build, dtypes=("bfloat16",), _flags=tuple(flags))


def _instructions(name):
    """The names that the sources ask for, to tell processors apart, and that a compiler defines for
    this one. None if the compiler does not know the processor."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    command = [compiler, f"-march={name}", "-x", "c++", "-dM", "-E", "/dev/null"]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        return None
    sources = (native_library._ROOT / file for file in native_library.sources())
    asked = re.findall(r"defined\((\w+)\)", "".join(file.read_text() for file in sources))
    return set(asked) & set(re.findall(r"#define (\w+)", found.stdout))


# One without AVX2 is rare: its build takes as long as the others.
@pytest.fixture(
    scope="session",
    params=[
        "native",
        *(
            pytest.param(name, marks=[pytest.mark.sweep] if name == "x86-64" else [])
            for name in OTHER_PROCESSORS
        ),
    ],
)
def any_library(request, library, native_kernels_dir):
    """The library as built for each kind of processor."""
    name = request.param
    if name == "native":
        return library
    if not OTHER_PROCESSORS[name] <= set(processor().split()):
        pytest.skip(f"this processor runs no code for {name}")
    of_other = _instructions(name)
    if of_other is None:
        pytest.skip(f"the compiler knows no {name}")
    if of_other == _instructions("native"):
        pytest.skip(f"this processor's own build is that for {name}")
    with pytest.MonkeyPatch.context() as patch:
        flags = [f"-march={name}" if one == "-march=native" else one for one in _FLAGS]
        patch.setattr(native_library, "_FLAGS", tuple(flags))
        loaded = load(native_kernels_dir)
    assert isinstance(loaded, Library), loaded
    loaded.add_experts()
    return loaded


@pytest.fixture
def compile_printing(monkeypatch, capfd):
    """A function that compiles, and returns the program and what the assembler printed."""
    tools = tools_dir()
    assert tools is not None
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_SASS", "1")

    def run(compile_it: Callable[[], Any]) -> tuple[Any, str]:
        jax.clear_caches()  # what is cached is not printed again
        capfd.readouterr()
        return compile_it(), "".join(capfd.readouterr())

    return run
