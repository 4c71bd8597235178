"""Fixtures for tests of several kernels."""

import shutil
import subprocess

import jax
import pytest
from jaxllm_kernels.native import library as native_library
from jaxllm_kernels.native.library import _FLAGS, KV_DTYPES, Library, load
from jaxllm_kernels.platform import Chip, chip_of, processor


@pytest.fixture
def gpu() -> Chip:
    """The GPU that JAX computes on."""
    chip = chip_of(jax.devices()[0])
    if chip.platform != "gpu":
        pytest.skip(f"needs a GPU, and this is a {chip.name}")
    return chip


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
    return loaded


@pytest.fixture(scope="session", params=["native", *OTHER_PROCESSORS])
def any_library(request, library, native_kernels_dir):
    """The library as built for each kind of processor."""
    name = request.param
    if name == "native":
        return library
    if not OTHER_PROCESSORS[name] <= set(processor().split()):
        pytest.skip(f"this processor runs no code for {name}")
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    knows_it = [compiler, f"-march={name}", "-x", "c++", "-E", "/dev/null"]
    if subprocess.run(knows_it, capture_output=True).returncode:
        pytest.skip(f"the compiler knows no {name}")
    with pytest.MonkeyPatch.context() as patch:
        flags = [f"-march={name}" if one == "-march=native" else one for one in _FLAGS]
        patch.setattr(native_library, "_FLAGS", tuple(flags))
        loaded = load(native_kernels_dir)
    assert isinstance(loaded, Library), loaded
    return loaded
