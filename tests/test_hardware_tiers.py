"""A run that needs what is not there does not look like one that passed."""

import re
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


HERE = Path(__file__).parent
SOURCES = {path.relative_to(HERE.parent): path.read_text() for path in HERE.rglob("test_*.py")}
README = (HERE / "README.md").read_text().replace("\\\n", "")


def what_runs(command: str) -> list[str]:
    """The folders and files that a command of the README names; all tests if it names none."""
    (line,) = re.findall(rf"^.*pytest .*{command}.*$", README, re.MULTILINE)
    return re.findall(r"tests/[\w/.]+", line) or ["tests"]


@pytest.mark.parametrize("marker", ["tpu_compile", "gpu_compile"])
def test_a_tier_has_all_of_its_tests(marker):
    folders = what_runs(f"-m {marker}\\b")
    marked = [path for path, text in SOURCES.items() if f"pytest.mark.{marker}" in text]
    assert len(marked) > 5
    outside = [path for path in marked if not any(map(path.is_relative_to, folders))]
    assert outside == [Path("tests/test_hardware_tiers.py")] * (folders != ["tests"])


def test_all_that_is_emulated_on_gpus_is_in_the_tier():
    """Elsewhere it is skipped for an older JAX, which nobody would notice."""
    named = {*map(Path, what_runs("test_gpu_attention.py") + what_runs("-k gpu"))}
    emulated = {
        path
        for path, text in SOURCES.items()
        if "why_no_mosaic_gpu" in text and re.search("interpret|dry_run", text)
    }
    assert len(emulated) > 5
    assert emulated - {Path("tests/test_hardware_tiers.py")} <= named
