"""Starts an engine in a process of its own, knows whether it lives, and ends it."""

import contextlib
import dataclasses
import importlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import msgspec

from jaxllm.config import EngineConfig
from jaxllm.errors import refused
from jaxllm.messages import Assignment

_KILLED_S = 5.0


class EngineProcess:
    """One engine process and the sockets to it, in a folder that only this user may enter.

    A plain subprocess, not one of `multiprocessing`: nothing of the user's own script is run again
    in it. It ends when this process ends, whatever becomes of this one.
    """

    def __init__(self, config: EngineConfig):
        config = _portable(config)
        self.assignment = Assignment(config, tempfile.mkdtemp(prefix="jaxllm-"), sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jaxllm.engine.process"], stdin=subprocess.PIPE
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(self.assignment) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone already, which `status` tells

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end; False if it is still there."""
        try:
            self._process.wait(timeout)
            return True
        except subprocess.TimeoutExpired:
            return False

    def give_up(self) -> None:
        """It is of no use any more. Does not wait for its end."""
        self._process.kill()

    def stop(self, grace_s: float) -> None:
        """Be rid of it: when it has ended by itself, or after this time."""
        if not self.wait(grace_s):
            kill(self._process)
        assert self._process.stdin is not None
        self._process.stdin.close()
        shutil.rmtree(self.assignment.directory, ignore_errors=True)


class JoinedEngine:
    """The engine that another process has started and will end, as one more frontend has it.

    Who started it is told of its end by the operating system, and tells the others.
    """

    def __init__(self, assignment: Assignment):
        self.assignment = assignment
        self.status: int | None = None  # set when it has ended

    def give_up(self) -> None:
        """Who started it will notice, too."""


def kill(process: subprocess.Popen) -> None:
    """Kill a process, and wait until it is gone.

    Not without a limit: who waits may be the handler of a signal, in the middle of a look at the
    process, which has locked it and cannot go on before the handler returns.
    """
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)


def _portable(config: EngineConfig) -> EngineConfig:
    """The config with classes by their names, under which the other process finds them."""
    names = tuple(map(_name, config.model.logits_processors))
    model = dataclasses.replace(config.model, logits_processors=names)
    return dataclasses.replace(config, model=model)


def _name(processor: Any) -> str:
    if isinstance(processor, str):
        return processor
    module, name = processor.__module__, processor.__qualname__
    try:
        found = module != "__main__" and getattr(importlib.import_module(module), name, None)
    except ImportError:
        found = None
    if found is not processor:
        raise refused(
            "logits_processors",
            processor,
            "the engine runs in another process, which cannot import it; put the class at the top "
            "level of a module that can be imported",
        )
    return f"{module}:{name}"
