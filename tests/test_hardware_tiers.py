"""A run that needs what is not there does not look like one that passed."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

MODULE = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("case", [1, 2])
def test_on_a_gpu(case):
    pytest.skip("needs a GPU, and this is a cpu")

@pytest.mark.tpu
def test_on_a_tpu():
    pytest.skip("needs a TPU")

@pytest.mark.tpu
def test_another_on_a_tpu():
    pytest.skip("needs eight TPUs")

@pytest.mark.gpu_compile
@pytest.mark.skipif(True, reason="no CUDA plugin")
def test_compiles_for_a_gpu():
    pass

@pytest.mark.tpu_compile
def test_compiles_for_a_tpu():
    pass

@pytest.mark.tpu_compile
@pytest.mark.skipif(True, reason="too little memory")
def test_more_compiles_for_a_tpu():
    pass

@pytest.mark.parametrize("platform", ["gpu"])
def test_on_a_cpu(platform):
    pytest.skip("of no interest")
"""


# Plugins that would be loaded anew for each run.
WITHOUT = [
    f"-pno:{name}" for name in ("cacheprovider", "langsmith_plugin", "schemathesis", "xdist")
]


@pytest.fixture
def run(pytester):
    """Runs the module with the options; returns the exit status and the lines about hardware."""
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text())
    markers = "tpu tpu_compile gpu gpu_compile".split()
    pytester.makeini("\n    ".join(["[pytest]\nmarkers =", *markers]))
    pytester.makepyfile(MODULE)

    def run(*options: str):
        result = pytester.runpytest_inprocess(*WITHOUT, *options)
        lines = [line for line in result.outlines if line.startswith(("NOT RUN", "FAILED"))]
        return result.ret, lines

    return run


def test_hardware_that_is_not_there_is_said_and_no_failure(run):
    gpu = "NOT RUN: 2 gpu tests (needs a GPU, and this is a cpu)"
    tpu = "NOT RUN: 2 tpu tests (needs a TPU; others for other reasons)"
    assert run("-m", "gpu") == (0, [gpu])
    assert run("-m", "tpu") == (0, [tpu])
    assert run() == (
        0,
        [
            tpu,
            gpu,
            "NOT RUN: 1 tpu_compile tests (too little memory)",
            "NOT RUN: 1 gpu_compile tests (no CUDA plugin)",
        ],
    )


def test_a_compile_tier_of_which_nothing_ran_fails(run):
    lines = [
        "NOT RUN: 1 gpu_compile tests (no CUDA plugin)",
        "FAILED: none of the gpu_compile tests passed",
    ]
    assert run("-m", "gpu_compile") == (1, lines)
    assert run("-m", " gpu_compile ", "-q") == (1, lines)


def test_a_compile_tier_of_which_some_ran_passes(run):
    assert run("-m", "tpu_compile") == (0, ["NOT RUN: 1 tpu_compile tests (too little memory)"])


def test_what_is_only_listed_or_asked_for_with_more_does_not_fail(run):
    assert run("-m", "gpu_compile", "--collect-only") == (0, [])
    assert run("-m", "gpu_compile or gpu")[0] == 0
    # Nothing was collected.
    assert run("-m", "gpu_compile", "-k", "nothing")[0] == 5
