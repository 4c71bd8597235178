"""Finds the programs that an earlier start compiled.

JAX's compilation cache identifies a program after it is traced and lowered. For all programs of an
engine this is the longest part of a start. This store finds them before that, by `identity`. Each
program has its own file, so a start can use what an interrupted start has compiled.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Hashable
from pathlib import Path

import jax

from jaxllm.logging import init_logger
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.programs.declare import stage_of
from jaxllm.programs.identity import foreign_code, identity_hash
from jaxllm.programs.serialized import from_bytes, hash_of, to_bytes

logger = init_logger(__name__)

# Programs that no start has used for this time belong to an old version or machine.
_KEPT_S = 60 * 24 * 3600
_HASH_LENGTH = len(hash_of(b""))


class ProgramStore:
    """The programs of one plan, in a directory of the compilation cache."""

    def __init__(self, directory: Path, plan: EnginePlan):
        self._directory = directory / identity_hash(plan)
        self._plan = plan

    @classmethod
    def of(cls, plan: EnginePlan) -> "ProgramStore | None":
        """Make the store. None if programs cannot be found by their plan: there is no cache, they
        contain foreign code, or other processes take part."""
        cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
        if not cache or foreign_code(plan) or jax.process_count() > 1:
            return None
        store = cls(Path(cache) / "programs", plan)
        return store if store._open() else None

    def load(self, key: Hashable) -> jax.stages.Compiled | None:
        """Load the program with this key, if it is there and intact."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        wanted, data = data[:_HASH_LENGTH], data[_HASH_LENGTH:]
        try:
            if hash_of(data).encode() != wanted:
                raise ValueError("the file is damaged")
            return from_bytes(data, stage_of(self._plan, key).mesh)
        except Exception as error:
            # Whatever the problem is, the program can be compiled.
            logger.warning("program %s is not taken from %s: %s", key, path, error)
            return None

    def save(self, key: Hashable, compiled: jax.stages.Compiled) -> None:
        """Store a program that was compiled here. Do not store one from JAX's cache: on CPUs that
        cannot be serialized again."""
        try:
            data = to_bytes(compiled)
            with tempfile.TemporaryDirectory(dir=self._directory) as scratch:
                file = Path(scratch) / "program"
                file.write_bytes(hash_of(data).encode() + data)
                # Concurrent starts do the same, and either file is good.
                file.replace(self._path(key))
        except Exception as error:
            # Programs that call Python, for example, cannot be serialized. They run nevertheless.
            logger.warning("program %s is not kept for the next start: %s", key, error)

    def _path(self, key: Hashable) -> Path:
        return self._directory / f"{str(key).replace(' ', '_')}.pickle"

    def _open(self) -> bool:
        """Make the directory, or mark it as used. Return whether its contents can be trusted."""
        parent = self._directory.parent
        try:
            parent.mkdir(mode=0o700, exist_ok=True)
            status = parent.stat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                logger.warning("others may write %s, so nothing is loaded from there", parent)
                return False
            if not self._directory.exists():
                _delete_old(parent)
            self._directory.mkdir(mode=0o700, exist_ok=True)
            os.utime(self._directory)
        except OSError as error:
            logger.warning("programs are not kept in %s: %s", parent, error.strerror)
            return False
        return True


def _delete_old(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.stat().st_mtime < time.time() - _KEPT_S:
            shutil.rmtree(entry, ignore_errors=True)
