"""What has to be set before JAX starts, where engines keep what they compile, and what is said of
hardware that is not there."""

import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from tests.plainly import compile_plainly

# Tests have a home of their own, so that none of them writes to the user's. What engines keep there
# by default, their programs and the native kernels, is compiled once for all the workers of a run,
# and is there for the next run: it is found by all that it is made of.
HOME = Path(__file__).parents[1] / "build" / "home_of_tests"
HOME.mkdir(mode=0o700, parents=True, exist_ok=True)
os.environ["HOME"] = str(HOME)

# The warpgroups of a GPU kernel in interpret mode wait for each other on threads of XLA's CPU pool,
# which has as many as the machine has cores. With fewer than warpgroups they would wait forever.
os.environ.setdefault("PJRT_NPROC", str(max(8, os.cpu_count() or 1)))

# Otherwise a second process that compiles for TPUs dies of the first one's lock file.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

# What no run has written anew for so long is of former code.
_KEPT_S = 7 * 24 * 3600

# The files that take longest come first: a worker that got one of them last would be waited for.
SLOWEST = (
    "kernels/test_tpu_attention.py",
    "kernels/test_ragged_paged_attention.py",
    "executor/test_multihost.py",
    "engine/test_pallas_backends.py",
    "engine/test_equalities.py",
    "parallel/test_pipeline_parallel.py",
    "models/test_parity.py",
    "kernels/test_native_attention.py",
    "batch/test_kill.py",
    "engine/test_oracle.py",
    "parallel/test_tensor_parallel.py",
    "bundled/test_bundled.py",
    "programs/test_bundle.py",
    "parallel/test_data_parallel.py",
    "training/test_trainer.py",
    "frontend/test_async_llm_engine.py",
    "engine/test_user_backend.py",
)

# Where tests are of what engines do with their steps, or compare formulas and kernels with a
# reference, XLA compiles in a fifth of the time, with the least optimisation. tests/README.md says
# why that is sound, and what stays optimised.
PLAINLY_COMPILED = (
    "anthropic", "batch", "bench", "cli", "engine", "executor", "frontend", "gguf", "kernels",
    "media", "models", "openai", "parallel", "quantization", "server", "simulation",
    "structured_output",
    "benchmarks/test_kernels.py", "benchmarks/test_scripts.py",
    "programs/test_bundle.py", "programs/test_report.py", "programs/test_store.py",
    "programs/test_warmup.py", "test_llm.py",
    "pooling/test_adapters.py", "pooling/test_decoders.py", "pooling/test_parallel.py",
    "prompt_logprobs", "sampling/test_choose.py", "sampling/test_sampler.py",
    "training/test_adapter.py", "training/test_trainer.py",
)  # fmt: skip
OPTIMISED_NEVERTHELESS = (
    "engine/test_batch_invariant.py", "engine/test_equalities.py", "engine/test_oracle.py",
    "engine/test_sixteen_bits.py", "media/test_qwen.py",
)  # fmt: skip

COMPILE_MARKERS = ("tpu_compile", "gpu_compile")
HARDWARE_MARKERS = ("tpu", "gpu", *COMPILE_MARKERS)


def pytest_sessionstart(session: pytest.Session) -> None:
    # Collected tests stay to the end. To look through them for garbage, again and again as their
    # number grows, would take a fifth of the time until the first test.
    gc.disable()
    if hasattr(session.config, "workerinput"):
        return  # their parent has done it
    for path in HOME.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another run deletes it, too
            if path.is_file() and path.stat().st_mtime < time.time() - _KEPT_S:
                path.unlink()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((i for i, name in enumerate(SLOWEST) if path.endswith(name)), len(SLOWEST))

    items.sort(key=place)
    if "sweep" not in config.option.markexpr:
        sweeps = [item for item in items if item.get_closest_marker("sweep")]
        items[:] = [item for item in items if not item.get_closest_marker("sweep")]
        config.hook.pytest_deselected(items=sweeps)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


def _is_plainly_compiled(item: pytest.Item) -> bool:
    path = item.path.relative_to(Path(__file__).parent)
    if any(item.get_closest_marker(marker) for marker in HARDWARE_MARKERS):
        return False
    if path.as_posix() in OPTIMISED_NEVERTHELESS:
        return False
    return not {path.parts[0], path.as_posix()}.isdisjoint(PLAINLY_COMPILED)


@pytest.hookimpl(tryfirst=True)  # before fixtures, which make engines
def pytest_runtest_setup(item: pytest.Item) -> None:
    compile_plainly(_is_plainly_compiled(item))


@pytest.fixture(scope="session")
def native_kernels_dir() -> Path:
    """Where engines by default keep the native kernels that they have compiled."""
    from jaxllm.config import DEFAULT_COMPILATION_CACHE_DIR

    path = Path(DEFAULT_COMPILATION_CACHE_DIR).expanduser() / "native"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="session")
def new_cache(tmp_path_factory, native_kernels_dir) -> Callable[[], Path]:
    """Makes compilation caches without programs, for tests of what is compiled and what is not. The
    native kernels, which take longest, are in all of them."""

    def new_cache() -> Path:
        path = tmp_path_factory.mktemp("compiled")
        (path / "native").symlink_to(native_kernels_dir)
        return path

    return new_cache


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """Note in a report what its test needs, since the process that sums up may have no tests."""
    report = yield
    # Keywords would not do: they have names of parameters, too.
    report.needs = [marker for marker in HARDWARE_MARKERS if item.get_closest_marker(marker)]
    return report


def _reports(config: pytest.Config, outcome: str, marker: str) -> list[pytest.TestReport]:
    """Of the tests with a marker those that ended so; under xdist, of all workers."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get(outcome, []) if reporter else []
    # A module that is skipped as a whole has a report of another kind.
    return [report for report in reports if marker in getattr(report, "needs", ())]


def _tier_not_run(config: pytest.Config) -> str | None:
    """The compile tier that was asked for, if none of its tests passed."""
    asked = config.option.markexpr.strip()
    # What a tier compiles with can be installed anywhere, so asking for it means to have it.
    if asked not in COMPILE_MARKERS or config.option.collectonly:
        return None
    return None if _reports(config, "passed", asked) else asked


# Last, so that what others find is not hidden; the terminal's summary comes after all of these. The
# workers of xdist, who see no reports, end here too, but only the status of their parent counts.
@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and _tier_not_run(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    for marker in HARDWARE_MARKERS:
        skipped = _reports(config, "skipped", marker)
        if not skipped:
            continue
        wheres = (cast(tuple[str, int, str], report.longrepr) for report in skipped)
        reasons = Counter(reason.removeprefix("Skipped: ") for _, _, reason in wheres)
        (reason, _), *others = reasons.most_common()
        more = "; others for other reasons" if others else ""
        terminalreporter.write_line(
            f"NOT RUN: {len(skipped)} {marker} tests ({reason}{more})", yellow=True, bold=True
        )
    if tier := _tier_not_run(config):
        terminalreporter.write_line(f"FAILED: none of the {tier} tests passed", red=True, bold=True)
