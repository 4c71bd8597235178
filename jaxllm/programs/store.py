"""Finds the programs that an earlier start compiled.

JAX's compilation cache identifies a program after it is traced and lowered. For all programs of an
engine this is the longest part of a start. This store finds them before that, by `identity`. Each
program has its own file, so a start can use what an interrupted start has compiled.

After an upgrade the identity is another one, and most programs are what they were. They are found
once more when they are lowered, by a second name of the same file.

Of an engine over several hosts each rank keeps its own programs. JAX's cache has only those that
rank 0 has compiled, and the others may not see its disk.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Hashable
from pathlib import Path

import jax
from jaxllm_kernels.platform import TUNED_TOGETHER

from jaxllm.logging import init_logger
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.programs.declare import stage_of
from jaxllm.programs.identity import foreign_code, identity_hash, module_hash
from jaxllm.programs.serialized import called_as, from_bytes, hash_of, to_bytes

logger = init_logger(__name__)

# Programs that no start has used for this time belong to an old version or machine.
_KEPT_S = 60 * 24 * 3600
_HASH_LENGTH = len(hash_of(b""))


class ProgramStore:
    """The programs of one plan, in a directory of the compilation cache."""

    def __init__(self, parent: Path, plan: EnginePlan):
        self._directory = parent / identity_hash(plan)
        self._modules = parent / "modules"  # all plans' programs, by their `module_hash`
        self._plan = plan
        # An engine's ranks may share a disk. The identity has the process of each device.
        self._rank = f"-rank-{jax.process_index()}" if jax.process_count() > 1 else ""

    @classmethod
    def of(cls, plan: EnginePlan) -> "ProgramStore | None":
        """Make the store. None if programs cannot be found by their plan: there is no cache, or
        they contain foreign code, or processes tune them together: one that has found its
        programs would leave the others waiting for its part."""
        cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
        tuned_together = plan.chip.platform in TUNED_TOGETHER and jax.process_count() > 1
        if not cache or foreign_code(plan) or tuned_together:
            return None
        store = cls(Path(cache) / "programs", plan)
        return store if store._open() else None

    def load(self, key: Hashable) -> jax.stages.Compiled | None:
        """Load the program with this key, if it is there and intact."""
        return self._load(key, self._path(key), lambda data: data)

    def find(
        self, key: Hashable, lowered: jax.stages.Lowered, module: str
    ) -> jax.stages.Compiled | None:
        """Load a program that was compiled for another plan or by other sources, if it is there and
        intact, and keep it for this one. `module` is all that the compiler would get."""

        def adopted(data: bytes) -> bytes:
            data = called_as(data, lowered)
            self._write(data, self._path(key))
            return data

        return self._load(key, self._module_path(key, module), adopted)

    def save(self, key: Hashable, compiled: jax.stages.Compiled, module: str) -> None:
        """Store a program that was compiled here. Do not store one from JAX's cache: on CPUs that
        cannot be serialized again."""
        try:
            self._write(to_bytes(compiled), self._path(key), self._module_path(key, module))
        except Exception as error:
            # Programs that call Python, for example, cannot be serialized. They run nevertheless.
            logger.warning("program %s is not kept for the next start: %s", key, error)

    def _load(
        self, key: Hashable, path: Path, prepare: Callable[[bytes], bytes]
    ) -> jax.stages.Compiled | None:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        wanted, data = data[:_HASH_LENGTH], data[_HASH_LENGTH:]
        try:
            if hash_of(data).encode() != wanted:
                raise ValueError("the file is damaged")
            return from_bytes(prepare(data), stage_of(self._plan, key).mesh)
        except Exception as error:
            # Whatever the problem is, the program can be compiled.
            logger.warning("program %s is not taken from %s: %s", key, path, error)
            return None

    def _write(self, data: bytes, *paths: Path) -> None:
        """Write one file with these names. Concurrent starts do the same, and either is good."""
        with tempfile.TemporaryDirectory(dir=self._directory) as scratch:
            file = Path(scratch) / "program"
            file.write_bytes(hash_of(data).encode() + data)
            for number, path in enumerate(paths):
                name = Path(scratch) / str(number)
                name.hardlink_to(file)
                name.replace(path)

    def _path(self, key: Hashable) -> Path:
        return self._directory / f"{str(key).replace(' ', '_')}{self._rank}.pickle"

    def _module_path(self, key: Hashable, module: str) -> Path:
        mesh = stage_of(self._plan, key).mesh
        return self._modules / f"{module_hash(self._plan, mesh, module)}{self._rank}"

    def _open(self) -> bool:
        """Make the directory, or mark it as used. Return whether its contents can be trusted."""
        parent = self._directory.parent
        try:
            parent.mkdir(mode=0o700, exist_ok=True)
            status = parent.stat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                logger.warning("others may write %s, so nothing is loaded from there", parent)
                return False
            self._modules.mkdir(mode=0o700, exist_ok=True)
            if not self._directory.exists():
                _delete_old(parent, self._modules)
            self._directory.mkdir(mode=0o700, exist_ok=True)
            os.utime(self._directory)
        except OSError as error:
            logger.warning("programs are not kept in %s: %s", parent, error.strerror)
            return False
        return True


def _delete_old(directory: Path, modules: Path) -> None:
    for entry in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another start does the same
            if entry != modules and entry.stat().st_mtime < time.time() - _KEPT_S:
                shutil.rmtree(entry, ignore_errors=True)
    for module in modules.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if module.stat().st_nlink == 1:  # no plan has it any more
                module.unlink()
