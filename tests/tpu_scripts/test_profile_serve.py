"""Profiling and serving."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.testing import make_tiny_checkpoint

SCRIPTS = Path(__file__).parents[2] / "tpu_scripts"


def test_a_trace_is_brought_here(ready):
    done = ready.run("profile.sh", "--traces", "my traces", "--", "--model", "my model", "-tp", "8")
    program, option, remote, *engine = (ready.host() / "python").read_text().splitlines()
    assert program == "jaxllm/host/profile.py"
    assert (option, engine) == ("--trace-dir", ["--model", "my model", "-tp", "8"])
    (trace,) = (ready.folder / "my traces").iterdir()
    assert remote.endswith(f"/{trace.name}")
    assert f"xprof '--logdir={trace}'" in done.stderr


@pytest.mark.slow
def test_the_program_that_profiles_leaves_a_trace(tmp_path):
    model = tmp_path / "model"
    make_tiny_checkpoint(model)
    traces = tmp_path / "traces"
    done = subprocess.run(
        [sys.executable, SCRIPTS / "host" / "profile.py", "--trace-dir", traces, "--model", model]
        + "--enforce-eager --max-num-seqs 2 --max-model-len 64".split()
        + "--num-prompts 2 --prompt-len 4 --output-len 2".split(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert list(traces.rglob("*.xplane.pb"))


def test_a_server_listens_on_the_loopback_of_both_ends(ready):
    ready.write("help", "commands:\n  serve            Serve.")
    ready.run("serve.sh", "--model", "my 'own' model", "--port", "9000", "--", "-tp", "8")
    (call,) = ready.calls()
    assert "--ssh-flag=-t -L 9000:127.0.0.1:9000" in call
    assert ready.jaxllm_argv() == (
        ["serve", "my 'own' model", "--port", "9000", "--host", "127.0.0.1", "-tp", "8"]
    )


def test_a_jaxllm_that_cannot_serve_is_told(ready):
    done = ready.run("serve.sh", "--model", "m", ok=False)
    assert "the jaxllm on this TPU VM has no serve command" in done.stderr
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        ("serve.sh", ["--model", "m"], "--tpu v6e-16 has 4 hosts; serve.sh serves from one"),
        ("serve.sh", [], "--model is missing"),
        ("profile.sh", ["--traces", "t", "--", "m"], "profile.sh profiles one"),
        ("profile.sh", ["--", "m"], "--traces is missing"),
        ("profile.sh", ["--traces", "t"], "the flags of the engine are missing"),
    ],
)
def test_wrong_flags_are_named(cloud, script, flags, message):
    done = cloud.run(script, *flags, tpu="v6e-16", ok=False)
    assert message in done.stderr
    assert cloud.calls() == []
