"""Servers for the benchmarks over HTTP: starts them, waits until they are ready, and ends them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from side_by_side import ROOT, cpu_seconds

_LONGEST_START_S = 900


class Server(NamedTuple):
    """A running server. Its processes are the frontend and, for jaxllm, the engine."""

    name: str
    port: int
    pid: int
    start_up_s: float

    @property
    def engine_pid(self) -> int:
        """The process that runs the steps."""
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                if b"jaxllm.engine.process" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        raise SystemExit(f"{self.name} has no engine process")

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the frontend."""
        return cpu_seconds(self.pid)

    def metric(self, name: str) -> float:
        """The value of a metric of /metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as page:
            for line in page.read().decode().splitlines():
                if line.startswith(f"jaxllm:{name}"):
                    return float(line.rpartition(" ")[2])
        raise SystemExit(f"/metrics has no {name}")


@contextlib.contextmanager
def jaxllm(model: str, *flags: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "jaxllm.cli.main", "serve", model, *flags]
    with started("jaxllm", command, "/ready") as server:
        yield server


@contextlib.contextmanager
def started(name: str, command: list[str], ready_path: str = "/health") -> Iterator[Server]:
    """Run a command with --port added; wait until it answers; end it at the end."""
    # On SIGTERM, exit normally, so that the servers are ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    port = free_port()
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    begun = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        env=os.environ | ({"PYTHONPATH": path} if name == "jaxllm" else {}),
        stdout=subprocess.DEVNULL,
    )
    try:
        while not _answers(port, ready_path):
            if process.poll() is not None:
                raise SystemExit(f"{name} ended with status {process.returncode}")
            if time.perf_counter() - begun > _LONGEST_START_S:
                raise SystemExit(f"{name} did not start within {_LONGEST_START_S} s")
            time.sleep(0.02)
        yield Server(name, port, process.pid, time.perf_counter() - begun)
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _answers(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False
