"""Starts an engine in a process of its own, watches the process, and ends it."""

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
    """One engine process, and the folder of its sockets, which only this user may enter.

    It is a plain subprocess, not one of `multiprocessing`, which would run the user's script again.
    It ends when this process ends, in whatever way.
    """

    def __init__(self, config: EngineConfig):
        config = _portable(config)
        self.assignment = Assignment(config, tempfile.mkdtemp(prefix="jaxllm-"), sys.path)
        self.follows = False  # whether it is known to follow rank 0 of an engine
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jaxllm.engine.process"], stdin=subprocess.PIPE
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(self.assignment) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process is already gone, as `status` reports

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the process to end; return False if it still runs."""
        try:
            self._process.wait(timeout)
            return True
        except subprocess.TimeoutExpired:
            return False

    def give_up(self) -> None:
        """Kill the process without waiting for its end."""
        self._process.kill()

    def stop(self, grace_s: float) -> None:
        """Wait for the process to end by itself, and kill it after `grace_s`."""
        if not self.wait(grace_s):
            kill(self._process)
        assert self._process.stdin is not None
        self._process.stdin.close()
        shutil.rmtree(self.assignment.directory, ignore_errors=True)


class JoinedEngine:
    """An engine that another process started and will end, for one more frontend.

    The process that started the engine learns of its end from the operating system, and reports it
    to the other frontends.
    """

    def __init__(self, assignment: Assignment):
        self.assignment = assignment
        self.status: int | None = None  # set when it has ended
        self.follows = False

    def give_up(self) -> None:
        """Do nothing: the process that started the engine will notice too."""


def kill(process: subprocess.Popen) -> None:
    """Kill a process, and wait a limited time until it is gone.

    The wait needs a limit: a signal handler may call this while the interrupted code holds the lock
    of the process object, and that code cannot go on before the handler returns.
    """
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)


def _portable(config: EngineConfig) -> EngineConfig:
    """Replace classes in the config by names, by which the other process imports them."""
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
