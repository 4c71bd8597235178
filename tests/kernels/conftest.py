"""The library of native kernels, built once for all tests of it."""

import shutil

import pytest
from jaxllm_kernels.native.library import Library, load


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler is here")
    loaded = load(tmp_path_factory.mktemp("native"))
    assert isinstance(loaded, Library), loaded
    return loaded
