"""What has to be set before JAX starts, and what is said of hardware that is not there."""

import os
from collections import Counter

import pytest

# The warpgroups of a GPU kernel in interpret mode wait for each other on threads of XLA's CPU pool,
# which has as many as the machine has cores. With fewer than warpgroups they would wait forever.
os.environ.setdefault("PJRT_NPROC", str(max(8, os.cpu_count() or 1)))

# Otherwise a second process that compiles for TPUs dies of the first one's lock file.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

COMPILE_MARKERS = ("tpu_compile", "gpu_compile")
HARDWARE_MARKERS = ("tpu", "gpu", *COMPILE_MARKERS)


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
        reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
        (reason, _), *others = reasons.most_common()
        more = "; others for other reasons" if others else ""
        terminalreporter.write_line(
            f"NOT RUN: {len(skipped)} {marker} tests ({reason}{more})", yellow=True, bold=True
        )
    if tier := _tier_not_run(config):
        terminalreporter.write_line(f"FAILED: none of the {tier} tests passed", red=True, bold=True)
