"""The benchmark of the GPU kernels runs where there is no GPU, on kernels that are interpreted."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from jaxllm_kernels.compat import why_no_mosaic_gpu

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernels.py"

no_mosaic = why_no_mosaic_gpu()


def dry_run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, "--dry-run", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=580,
    )


@pytest.mark.slow
@pytest.mark.skipif(bool(no_mosaic), reason=f"the Mosaic GPU backend {no_mosaic}")
def test_a_dry_run_has_right_rows_of_every_kind(tmp_path):
    report = tmp_path / "report.md"
    done = dry_run("--output", report)
    assert done.returncode == 0, done.stderr
    lines = report.read_text().splitlines()
    assert set(lines) <= set(done.stdout.splitlines())
    assert "DRY RUN: the figures below mean nothing." in lines
    tables = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    header, _, uniform, log_normal, prefill_header, _, prefill = tables
    assert header[:3] == ["batch", "context", "lengths"]
    assert [uniform[2], log_normal[2]] == ["uniform", "log-normal"]
    assert prefill_header[:2] == ["chunk", "context"]
    for names, row in ((header, uniform), (header, log_normal), (prefill_header, prefill)):
        cells = dict(zip(names, row, strict=True))
        assert float(cells["error"]) < 1e-2  # one that is not reads "WRONG ..."
        assert float(cells["us/layer"]) > 0
        assert float(cells["xla us"]) >= 0


def test_a_row_that_fails_costs_no_other_and_what_was_measured_is_there(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    # Not by `import kernels`, which may be the folder of this name.
    spec = importlib.util.spec_from_file_location("benchmarks_kernels", SCRIPT)
    kernels = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, kernels)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # it would be set for good
    spec.loader.exec_module(kernels)

    def measure_row(number):
        if number == 1:
            raise RuntimeError("no room\nfor it")
        return ["measured"]

    monkeypatch.setattr(kernels, "measure_row", measure_row)
    report = kernels.Report(tmp_path / "report.md")
    for number in range(3):
        kernels.run_row(report, (number,), number)
    assert report.has_failures
    rows = ["| 0 | measured |", "| 1 | FAILED: RuntimeError no room |", "| 2 | measured |"]
    assert (tmp_path / "report.md").read_text().splitlines() == rows
    assert kernels.time_beside("peer", lambda: measure_row(1)) is None


@pytest.mark.skipif(not no_mosaic, reason="this JAX is new enough")
def test_an_older_jax_is_refused():
    done = dry_run()
    assert done.returncode == 2
    assert "which a dry run interprets, needs JAX 0.11.2" in done.stderr
