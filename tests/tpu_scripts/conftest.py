"""A fake cloud for the scripts: it has at most one TPU, and its hosts are folders."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPTS = HERE.parents[1] / "tpu_scripts"
TPU = ["--project", "my-project", "--zone", "us-east5-b", "--name", "my-tpu"]


class Cloud:
    """The fake cloud; see fake_gcloud.py for its files."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "hosts").mkdir()
        fakes = {"gcloud": "fake_gcloud.py", "uv": "fake_uv.py", "host-jaxllm": "fake_jaxllm.py"}
        for name, file in fakes.items():
            self.executable(name, f'exec {sys.executable} -S {HERE / file} "$@"')
        self.executable("host-python", 'printf "%s\\n" "$@" >"$HOME/python"; mkdir -p "$3"')
        self.write("num_hosts", "1")
        self.write("help", "commands:\n  generate  Generate.")

    def executable(self, name: str, line: str) -> None:
        """Put a command on the PATH of all hosts."""
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def environment(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "CLOUD": str(self.folder), "LC_ALL": "C"}

    def run(
        self, script: str, *flags: str, tpu: str = "v6e-8", ok: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a script for the cloud's TPU, with these flags after those that identify the TPU."""
        done = self.run_plain(script, *TPU, "--tpu", tpu, "--poll-seconds", "0", *flags)
        assert (done.returncode == 0) == ok, done.stderr + done.stdout
        return done

    def run_plain(self, script: str, *flags: str) -> subprocess.CompletedProcess[str]:
        """Run a script with these flags only."""
        return subprocess.run(
            [SCRIPTS / script, *flags],
            capture_output=True,
            text=True,
            env=self.environment(),
            cwd=self.folder,
            timeout=600,
        )

    def start(self, script: str, *flags: str) -> subprocess.Popen[str]:
        """Start a script for the cloud's TPU in its own process group, like a terminal."""
        return subprocess.Popen(
            [SCRIPTS / script, *TPU, "--tpu", "v6e-8", *flags],
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment(),
            cwd=self.folder,
            start_new_session=True,
        )

    def calls(self) -> list[list[str]]:
        file = self.folder / "calls.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def actions(self) -> list[str]:
        """The actions on TPUs, without `describe`: ["create my-tpu ...", ...]."""
        calls = [" ".join(call[2:]) for call in self.calls() if call[0] == "compute"]
        return [call for call in calls if " describe " not in call]

    def host(self, number: int = 0) -> Path:
        return self.folder / "hosts" / str(number)

    def jaxllm_argv(self, number: int = 0) -> list[str]:
        """The arguments of the last jaxllm that ran on a host."""
        return json.loads((self.host(number) / "argv.json").read_text())


@pytest.fixture
def cloud(tmp_path: Path) -> Cloud:
    folder = tmp_path / "the cloud"
    folder.mkdir()
    return Cloud(folder)


@pytest.fixture
def ready(cloud: Cloud) -> Cloud:
    """A cloud with a TPU that is set up."""
    cloud.run("create.sh")
    cloud.run("setup.sh", "--package", "jaxllm==1")
    (cloud.folder / "calls.jsonl").unlink()
    return cloud
