"""A batch in processes of its own that are killed, stopped and started again."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxllm import SamplingParams

pytestmark = pytest.mark.slow

# It commits often, and begins no more than so many lines while there is a file HOLD. So it is in
# the midst of them, however late it is killed.
COMMAND = """
import os, sys, time
from jaxllm.batch import job, run
from jaxllm.cli.main import main

run._COMMIT_EVERY_S = 0.02
unfinished_items = job.unfinished_items

def held(*args):
    for index, item in enumerate(unfinished_items(*args)):
        while index >= 100 and os.path.exists(os.environ["HOLD"]):
            time.sleep(0.01)
        yield item

job.unfinished_items = held
sys.exit(main())
"""


@pytest.fixture(autouse=True, scope="module")
def compiled(engine):
    """A killed process cannot keep what it compiled: here all is compiled before."""
    params = SamplingParams(temperature=1, max_tokens=8, ignore_eos=True)
    for number in range(8):
        engine.add_request(str(number), [number, 7], params)
    while engine.has_unfinished_requests():
        engine.step()


def start(bench, *more) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *bench.argv, *more],
        env=os.environ | {"HOLD": str(hold(bench))},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def hold(bench) -> Path:
    return bench.input.with_name("hold")


def wait_for_results(bench, process, timeout_s: float = float("inf")) -> None:
    """Wait until the process has committed something, or has ended, or so long."""
    journal = bench.journal / "journal"
    before = os.path.getsize(journal) if journal.exists() else 0
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        if journal.exists() and os.path.getsize(journal) > before:
            return
        time.sleep(0.005)


def write_lines(bench, count: int) -> tuple[list[int], list[int]]:
    """The numbers of the lines that are good, and those that are bad: now and then one."""
    good = [i for i in range(count) if i % 97 != 5]
    bad = [i for i in range(count) if i % 97 == 5]
    bench.write(
        *(
            {
                "custom_id": str(i),
                "prompt_token_ids": [1 + i % 300, 7],
                "max_tokens": 0 if i in bad else 8,
                "ignore_eos": True,
            }
            for i in range(count)
        )
    )
    return good, bad


@pytest.mark.parametrize(
    ("times", "num_lines"), [(2, 300), pytest.param(6, 1000, marks=pytest.mark.sweep)]
)
def test_killed_several_times_a_batch_ends_complete_and_in_order(bench, times, num_lines):
    rng = random.Random(0)
    good, bad = write_lines(bench, num_lines)
    hold(bench).touch()
    for number in range(times):
        process = start(bench, "--ordered")
        if number % 3:
            wait_for_results(bench, process)
            time.sleep(rng.uniform(0, 0.2))
        else:  # most likely as it starts
            wait_for_results(bench, process, timeout_s=rng.uniform(0, 5))
        process.kill()
        _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err
    # Each time something was left to do, and in the end something had been done.
    assert not bench.output.exists()
    assert os.path.getsize(bench.journal / "journal") > 0
    hold(bench).unlink()
    process = start(bench, "--ordered")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert [int(one["custom_id"]) for one in bench.errors()] == bad
    assert [int(one["custom_id"]) for one in bench.answers()] == good
    assert all(len(one["outputs"][0]["token_ids"]) == 8 for one in bench.answers())


def test_a_terminated_batch_ends_with_status_75_and_goes_on(bench):
    good, bad = write_lines(bench, 300)
    hold(bench).touch()
    process = start(bench)
    wait_for_results(bench, process)
    process.terminate()
    hold(bench).unlink()
    _, err = process.communicate()
    assert process.returncode == 75, err
    assert "stopped before the end; the same command goes on" in err
    assert 0 < len(bench.answers()) < len(good)
    process = start(bench)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert sorted(int(one["custom_id"]) for one in bench.errors()) == bad
    assert sorted(int(one["custom_id"]) for one in bench.answers()) == good


def test_terminated_while_the_model_loads_a_batch_can_be_begun_again(bench):
    write_lines(bench, 10)
    process = start(bench)
    while not (bench.journal / "manifest.json").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.terminate()
    _, err = process.communicate()
    assert process.returncode == 75, err
    assert "Traceback" not in err
    assert bench.run() == 0
    assert len(bench.answers()) == 9


def test_a_batch_whose_device_never_answers_ends_and_goes_on(bench, tmp_path, monkeypatch):
    bench.argv.remove("--enforce-eager")  # of its steps none compiles
    bench.argv += ["--logits-processors=hanging_device:HangingDevice", "--max-num-seqs=1"]
    hangs = tmp_path / "hangs"
    monkeypatch.setenv("HANGS_WHILE_EXISTS", str(hangs))
    engine_tests = str(Path(__file__).parents[1] / "engine")
    monkeypatch.setenv("PYTHONPATH", engine_tests, prepend=os.pathsep)
    good, bad = write_lines(bench, 300)
    hold(bench).touch()
    process = start(bench, "--engine-iteration-timeout=4")
    wait_for_results(bench, process)
    hangs.touch()
    hold(bench).unlink()
    _, err = process.communicate()
    assert process.returncode == 1, err
    assert "the engine hangs: the step has not got on" in err and "hanging_device.py" in err
    assert 0 < len(bench.answers()) < len(good)
    hangs.unlink()
    # Now a step may compile. A logits processor is foreign code, whose programs are not kept.
    process = start(bench, "--enforce-eager")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert sorted(int(one["custom_id"]) for one in bench.errors()) == bad
    assert sorted(int(one["custom_id"]) for one in bench.answers()) == good
