"""What determines the bytes of a block beside the hash of its content: the model and its files, how
it computes, and how its caches are laid out."""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxllm.offload.block_files import BlockFiles, make_private
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.programs.identity import program_identity

# Of the identity of programs, what changes keys and values. How steps are cut does not, nor how
# many blocks there are.
_FACTS = (
    "jaxllm", "sources", "jax", "jaxlib", "compiler", "JAX settings", "XLA optimises little",
    "XLA flags", "host", "architecture", "model_class", "dtype", "block_size", "kv_cache",
    "attention", "matmul", "head_products", "row_sums", "experts", "coded_products",
)  # fmt: skip
# Of a file, so many bytes at so many places: some 16,000 reads of 16 GB.
_SAMPLE, _SAMPLED_EVERY = 4096, 1 << 20


def block_identity(plan: EnginePlan) -> bytes:
    """The identity as text. Files of weights count by names, sizes and times: to hash them all
    would take longer than to load them."""
    return _identity(plan, lambda path: path.stat().st_mtime_ns)


def shared_identity(plan: EnginePlan) -> bytes:
    """The same for engines on several machines, where times differ. A hash of samples from all over
    a file stands for it: other weights are others nearly everywhere."""
    return hashlib.sha256(_identity(plan, _sampled)).digest()


def _identity(plan: EnginePlan, about: Callable[[Path], Any]) -> bytes:
    facts = program_identity(plan)
    files = sorted(
        (path.relative_to(plan.model_dir).as_posix(), path.stat().st_size, about(path))
        for path in plan.model_dir.rglob("*")
        if path.is_file() and not _is_hidden(path.relative_to(plan.model_dir))
    )
    caches = [
        [
            (array.shape[1:], str(array.dtype))
            for array in (*stage.cache_shapes, *jax.tree.leaves(stage.snapshot_shapes))
        ]
        for stage in plan.stages
    ]
    windows = [group.window for group in plan.cache_groups]
    how = (plan.load_format, plan.seed if plan.load_format == "dummy" else None)
    told = [facts[name] for name in _FACTS]
    return repr((told, files, caches, windows, how, _part(plan))).encode()


def _part(plan: EnginePlan) -> Any:
    """Which part of every block this process has, over several hosts: of how many, and which
    pieces of each cache its devices have. None: all of it."""
    devices = [device for stage in plan.stages for device in stage.mesh.devices.flat]
    processes = sorted({device.process_index for device in devices})
    if len(processes) == 1:
        return None
    pieces = [
        sorted(
            str((index or ())[1:])
            for index in array.sharding.addressable_devices_indices_map(array.shape).values()
        )
        for stage in plan.stages
        for array in (*stage.cache_shapes, *jax.tree.leaves(stage.snapshot_shapes))
    ]
    return len(processes), processes.index(jax.process_index()), pieces


def _is_hidden(path: Path) -> bool:
    """Whether a file is none of the model's, such as the notes of who has downloaded it."""
    return any(part.startswith(".") for part in path.parts)


def _sampled(path: Path) -> bytes:
    status = path.stat()
    return _samples(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _samples(path: Path, size: int, mtime_ns: int) -> bytes:
    """The hash of samples of a file, which all replicas of a process have in common."""
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb", buffering=0) as file:
        for start in range(0, size, _SAMPLED_EVERY):
            file.seek(start)
            digest.update(file.read(_SAMPLE))
    return digest.digest()


def open_files(plan: EnginePlan) -> BlockFiles | None:
    """The files of blocks of a plan, as far as this process has their blocks; None: it has none."""
    if plan.offload is None or plan.offload.directory is None:
        return None
    directory = plan.offload.directory
    if rank := jax.process_index():
        # Hosts may share the directory, and each rank has a limit of its own.
        make_private(directory)
        directory /= f"rank-{rank}"
    return BlockFiles(directory, block_identity(plan), plan.offload.directory_bytes)
