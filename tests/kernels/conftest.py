"""What tests of several kernels share."""

import shutil

import jax
import pytest
from jaxllm_kernels.native.library import Library, load
from jaxllm_kernels.platform import Chip, chip_of


@pytest.fixture
def gpu() -> Chip:
    """The GPU that JAX computes on."""
    chip = chip_of(jax.devices()[0])
    if chip.platform != "gpu":
        pytest.skip(f"needs a GPU, and this is a {chip.name}")
    return chip


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The library of native kernels, built once."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler is here")
    loaded = load(tmp_path_factory.mktemp("native"))
    assert isinstance(loaded, Library), loaded
    return loaded
