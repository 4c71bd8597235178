"""Where an engine finds the programs that it compiled at an earlier start.

JAX's compilation cache knows a program when it has been traced and lowered, which for all programs
of an engine takes longer than anything else in a start. Here they are found by what they are made
for (`identity`) before that, each in a file of its own: what an interrupted start has compiled is
there for the next one.
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

# Programs that no start has asked for in so long are of a version or a machine that is gone.
_KEPT_S = 60 * 24 * 3600
_HASH_LENGTH = len(hash_of(b""))


class ProgramStore:
    """The programs of one plan, in a directory of the compilation cache."""

    def __init__(self, directory: Path, plan: EnginePlan):
        self._directory = directory / identity_hash(plan)
        self._plan = plan

    @classmethod
    def of(cls, plan: EnginePlan) -> "ProgramStore | None":
        """None where programs are not to be found again by their plan: there is no cache, they have
        code in them of which we know nothing, or other processes take part."""
        cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
        if not cache or foreign_code(plan) or jax.process_count() > 1:
            return None
        store = cls(Path(cache) / "programs", plan)
        return store if store._open() else None

    def load(self, key: Hashable) -> jax.stages.Compiled | None:
        """The program with this key, if it is there and whole."""
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
            # Whatever keeps it from being loaded: it can be compiled.
            logger.warning("program %s is not taken from %s: %s", key, path, error)
            return None

    def save(self, key: Hashable, compiled: jax.stages.Compiled) -> None:
        """Keep a program that has been compiled here; not one that JAX's cache had, which on CPUs
        cannot be serialized once more."""
        try:
            data = to_bytes(compiled)
            with tempfile.TemporaryDirectory(dir=self._directory) as scratch:
                file = Path(scratch) / "program"
                file.write_bytes(hash_of(data).encode() + data)
                # Who starts at the same time does the same, and either file is good.
                file.replace(self._path(key))
        except Exception as error:
            # One that calls Python, for example, cannot be serialized. It runs nevertheless.
            logger.warning("program %s is not kept for the next start: %s", key, error)

    def _path(self, key: Hashable) -> Path:
        return self._directory / f"{str(key).replace(' ', '_')}.pickle"

    def _open(self) -> bool:
        """Make the directory, or say that it is in use; whether what is in it may be trusted."""
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
