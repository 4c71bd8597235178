"""The process of an engine, as its owner has it."""

import subprocess
import threading

import pytest

from jaxllm.config import EngineConfig
from jaxllm.ending import WRITING_S, longest_end_s, patience_s
from jaxllm.frontend import engine_process
from jaxllm.frontend.engine_process import kill


def test_a_signal_that_comes_while_a_process_is_looked_at_does_not_wait_forever(monkeypatch):
    monkeypatch.setattr(engine_process, "_KILLED_S", 0.5)
    process = subprocess.Popen(["sleep", "1000"])
    # What is interrupted by the handler of a signal has the lock, and goes on only after it.
    with process._waitpid_lock:
        handler = threading.Thread(target=kill, args=(process,), daemon=True)
        handler.start()
        handler.join(200)
        is_done = not handler.is_alive()
    assert is_done
    assert process.wait(200) == -9


def test_what_is_killed_is_gone():
    process = subprocess.Popen(["sleep", "1000"])
    kill(process)
    assert process.returncode == -9


@pytest.mark.parametrize(
    ("options", "of_files"),
    [({}, 0.0), ({"kv_offloading_size": 1, "kv_offloading_path": "/blocks"}, WRITING_S)],
)
def test_its_owner_waits_longer_than_its_end_may_take(options, of_files):
    config = EngineConfig.create("model", **options)
    assert of_files < longest_end_s(config) < patience_s(config)
