"""Compiles the programs of an engine, keeps them between starts, and counts compilations.

The runner calls the compiled executables, never the jitted function: a wrong shape is a TypeError
and cannot become a silent recompilation.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jaxllm_kernels.compat import without_source_locations

from jaxllm.logging import init_logger
from jaxllm.runner.memory import format_bytes

logger = init_logger(__name__)

# XLA compiles outside the GIL; lowering holds it. More threads than this mostly add memory.
_COMPILE_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Something to compile: a traced function with the shapes it is called with."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # trees of ShapeDtypeStruct, which know their devices
    donate: tuple[int, ...]
    out_shardings: Any = None  # None: as XLA likes
    # "cpu", "gpu" or "tpu"; None: where the process runs.
    platform: str | None = None
    compiler_options: tuple[tuple[str, str], ...] = ()

    def lower(self) -> jax.stages.Lowered:
        # The name is part of profiles and of the persistent cache's file names.
        self.function.__name__ = self.name
        jitted = jax.jit(
            self.function, donate_argnums=self.donate, out_shardings=self.out_shardings
        )
        platform = "cuda" if self.platform == "gpu" else self.platform
        traced = jitted.trace(*self.arguments)
        with without_source_locations():
            return traced.lower(lowering_platforms=(platform,) if platform else None)

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        return lowered.compile(compiler_options=dict(self.compiler_options) or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """What start-up compiled, or found to be compiled already."""

    num_programs: int
    num_loaded: int  # from a bundle
    cache_hits: int
    seconds: float
    largest_temp_bytes: int
    code_bytes: int

    @property
    def num_compiled(self) -> int:
        return self.num_programs - self.num_loaded - self.cache_hits

    def __str__(self) -> str:
        loaded = f", {self.num_loaded} from the bundle" if self.num_loaded else ""
        return (
            f"{self.num_programs} programs in {self.seconds:.1f} s: {self.num_compiled} compiled, "
            f"{self.cache_hits} from the compilation cache{loaded}; largest temporary "
            f"{format_bytes(self.largest_temp_bytes)}, code {format_bytes(self.code_bytes)}"
        )


class Programs:
    """The executables of an engine by key, compiled at start (`compile_all`) or when asked for, but
    for those that are given."""

    def __init__(
        self, programs: Mapping[Hashable, Program], loaded: Mapping[Hashable, Any] | None = None
    ):
        self._programs = dict(programs)
        self._compiled: dict[Hashable, Any] = dict(loaded or {})

    def __getitem__(self, key: Hashable) -> Any:
        compiled = self._compiled.get(key)
        if compiled is None:
            program = self._programs[key]
            compiled = self._compiled[key] = program.compile(program.lower())
        return compiled

    def compile_all(self) -> CompileReport:
        """Compile everything: lowered here one after another, compiled in threads meanwhile."""
        start, hits = time.perf_counter(), compilation_counter.cache_hits
        num_loaded = len(self._compiled)
        with ThreadPoolExecutor(_COMPILE_THREADS, "compile") as pool:
            pending: dict[Hashable, Future] = {
                key: pool.submit(program.compile, program.lower())
                for key, program in self._programs.items()
                if key not in self._compiled
            }
            self._compiled |= {key: future.result() for key, future in pending.items()}
        sizes = [compiled.memory_analysis() for compiled in self._compiled.values()]
        sizes = [size for size in sizes if size is not None]
        return CompileReport(
            num_programs=len(self._compiled),
            num_loaded=num_loaded,
            seconds=time.perf_counter() - start,
            cache_hits=compilation_counter.cache_hits - hits,
            largest_temp_bytes=max((s.temp_size_in_bytes for s in sizes), default=0),
            code_bytes=sum(s.generated_code_size_in_bytes for s in sizes),
        )


class CompilationCounter:
    """Counts the compilations of this process; JAX reports them as monitoring events.

    To JAX, a program that is fetched from the compilation cache is one that is compiled, too.
    """

    _COMPILE = "/jax/core/compile/backend_compile_duration"
    _CACHE_HIT = "/jax/compilation_cache/cache_hits"

    def __init__(self) -> None:
        self.compiles = 0  # cache hits included
        self.cache_hits = 0
        # Events come from the threads that compile.
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == self._COMPILE:
            with self._lock:
                self.compiles += 1

    def _on_event(self, event: str, **_: Any) -> None:
        if event == self._CACHE_HIT:
            with self._lock:
                self.cache_hits += 1


# Listeners cannot be taken away again, so there is one for the whole process.
compilation_counter = CompilationCounter()


def use_compilation_cache(name: str | None) -> None:
    """Keep every compiled program on disk, however small, so that the next start is fast.

    The setting is the process's: without a name it stays as it is.
    """
    if not name:
        return
    directory = Path(name).expanduser()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("no compilation cache: cannot write %s (%s)", directory, error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # JAX opens a directory once in a process; this makes it open the new one.
    compilation_cache.reset_cache()
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # Otherwise the path of the cache becomes part of every key.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Compile anew: what comes from the cache cannot be serialized once more, on a CPU at least;
    it is without its functions when it is loaded again."""
    was = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # or JAX would not look at the setting again
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was)
        compilation_cache.reset_cache()
