"""Compiles the programs of an engine, keeps them between starts, and counts compilations.

The runner calls the compiled executables, never the jitted function: a wrong shape is a TypeError
and cannot become a silent recompilation.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.experimental.compilation_cache import compilation_cache
from jaxllm_kernels.compat import without_source_locations

from jaxllm.errors import OutOfMemoryError
from jaxllm.heap import trim_heap
from jaxllm.logging import init_logger
from jaxllm.plan.memory import format_bytes
from jaxllm.plural import counted
from jaxllm.programs.behind import CompileBehind
from jaxllm.programs.progress import CompileProgress

logger = init_logger(__name__)

# XLA compiles outside the GIL, but lowering holds it. More threads mostly need more memory.
_COMPILE_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A traced function and the shapes of its arguments, to be compiled."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # trees of ShapeDtypeStruct with shardings
    donate: tuple[int, ...]
    out_shardings: Any = None  # None: XLA chooses
    # "cpu", "gpu" or "tpu"; None: the platform of the process.
    platform: str | None = None
    compiler_options: tuple[tuple[str, str], ...] = ()

    def lower(self) -> jax.stages.Lowered:
        # Profiles and file names of the persistent cache contain the name.
        self.function.__name__ = self.name
        jitted = jax.jit(
            self.function, donate_argnums=self.donate, out_shardings=self.out_shardings
        )
        platform = "cuda" if self.platform == "gpu" else self.platform
        traced = jitted.trace(*self.arguments)
        with without_source_locations():
            return traced.lower(lowering_platforms=(platform,) if platform else None)

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        try:
            return lowered.compile(compiler_options=dict(self.compiler_options) or None)
        except jax.errors.JaxRuntimeError as error:
            # Compilers for accelerators know a program's memory; others fail when it runs.
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = str(error).partition("\n")[0].partition("RESOURCE_EXHAUSTED: ")[2]
            raise OutOfMemoryError(
                f"the program {self.name} does not fit into a device ({reason}); lower "
                "--kv-cache-memory-bytes, --max-num-batched-tokens or --max-num-seqs, or take "
                "more devices"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """The programs that start-up compiled, or found compiled."""

    num_programs: int
    num_loaded: int  # from a bundle
    cache_hits: int  # from JAX's cache or the store
    seconds: float
    largest_temp_bytes: int
    code_bytes: int

    @property
    def num_compiled(self) -> int:
        return self.num_programs - self.num_loaded - self.cache_hits

    def __str__(self) -> str:
        loaded = f", {self.num_loaded} from the bundle" if self.num_loaded else ""
        return (
            f"{counted(self.num_programs, 'program')} in {self.seconds:.1f} s: "
            f"{self.num_compiled} compiled, "
            f"{self.cache_hits} from the compilation cache{loaded}; largest temporary "
            f"{format_bytes(self.largest_temp_bytes)}, code {format_bytes(self.code_bytes)}"
        )


class Store(Protocol):
    """Stores executables between starts."""

    def load(self, key: Hashable) -> jax.stages.Compiled | None: ...

    def find(
        self, key: Hashable, lowered: jax.stages.Lowered, module: str
    ) -> jax.stages.Compiled | None: ...

    def save(self, key: Hashable, compiled: jax.stages.Compiled, module: str) -> None: ...


class Programs:
    """The executables of an engine by key. Those that are neither given nor in the store are
    compiled at start (`compile_all`), behind the first steps (`compile_behind`), or on first use.
    """

    def __init__(
        self,
        programs: Mapping[Hashable, Program],
        loaded: Mapping[Hashable, Any] | None = None,
        store: Store | None = None,
    ):
        self._programs = dict(programs)
        self._compiled: dict[Hashable, Any] = dict(loaded or {})
        self._store = store
        # Programs that a thread loads or compiles on first use. Only one at a time is lowered.
        self._being_made: dict[Hashable, Future] = {}
        self._lock, self._lowering = threading.Lock(), threading.Lock()
        self._behind: CompileBehind | None = None

    def __getitem__(self, key: Hashable) -> Any:
        compiled = self._compiled.get(key)
        return self._make(key, is_needed=True) if compiled is None else compiled

    def compile_behind(self) -> None:
        """Load or compile all programs in threads of their own, while steps run."""
        missing = [key for key in self._programs if key not in self._compiled]
        self._behind = CompileBehind(missing, self._make, _COMPILE_THREADS)

    def begin_to_stop(self) -> None:
        """Begin with no more programs behind the steps."""
        if self._behind is not None:
            self._behind.begin_to_stop()

    def stop(self) -> None:
        """Compile nothing more behind the steps."""
        if self._behind is not None:
            self._behind.stop()

    def compile_all(self) -> CompileReport:
        """Load the stored programs and compile the rest: this thread lowers them one by one, and
        other threads compile meanwhile."""
        start, before = time.perf_counter(), compilation_counter.anew
        num_given = len(self._compiled)
        with ThreadPoolExecutor(_COMPILE_THREADS, "compile") as pool:
            missing = [key for key in self._programs if key not in self._compiled]
            stored = dict(zip(missing, pool.map(self._load, missing), strict=True))
            num_there = len(self._programs) - sum(stored[key] is None for key in missing)
            with CompileProgress(len(self._programs), num_there) as progress:

                def compile(key: Hashable, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
                    with progress.compiling(key):
                        return self._compile(key, lowered)

                pending: dict[Hashable, Future] = {
                    key: pool.submit(compile, key, self._programs[key].lower())
                    for key in missing
                    if stored[key] is None
                }
                fresh = {key: future.result() for key, future in pending.items()}
            self._compiled |= stored | fresh
        trim_heap()  # the compiler has released much memory
        sizes = [compiled.memory_analysis() for compiled in self._compiled.values()]
        sizes = [size for size in sizes if size is not None]
        return CompileReport(
            num_programs=len(self._compiled),
            num_loaded=num_given,
            seconds=time.perf_counter() - start,
            cache_hits=len(missing) - (compilation_counter.anew - before),
            largest_temp_bytes=max((s.temp_size_in_bytes for s in sizes), default=0),
            code_bytes=sum(s.generated_code_size_in_bytes for s in sizes),
        )

    def _load(self, key: Hashable) -> jax.stages.Compiled | None:
        return self._store.load(key) if self._store else None

    def _make(self, key: Hashable, *, is_needed: bool = False) -> jax.stages.Compiled:
        """Load or compile a program on first use, or wait for the thread that does. If that cannot,
        a step that needs the program tries again."""
        future = Future()
        with self._lock:
            # The thread before may just have put it there.
            if (compiled := self._compiled.get(key)) is not None:
                return compiled
            being_made = self._being_made.setdefault(key, future)
        if being_made is not future:
            try:
                return being_made.result()
            except Exception:
                if not is_needed:
                    raise
            return self._make(key, is_needed=True)
        try:
            compiled = self._load(key) or self._compile_now(key, is_needed)
        except BaseException as error:
            self._end_making(key)
            future.set_exception(error if isinstance(error, Exception) else CancelledError())
            raise
        self._end_making(key, compiled)
        future.set_result(compiled)
        trim_heap()
        return compiled

    def _end_making(self, key: Hashable, compiled: jax.stages.Compiled | None = None) -> None:
        with self._lock:
            del self._being_made[key]
            if compiled is not None:
                self._compiled[key] = compiled

    def _compile_now(self, key: Hashable, is_needed: bool) -> jax.stages.Compiled:
        if is_needed:
            logger.info(
                "compiling %s, now that it is needed; %d of %d programs are there",
                key,
                len(self._compiled),
                len(self._programs),
            )
        with self._lowering:
            lowered = self._programs[key].lower()
        return self._compile(key, lowered)

    def _compile(self, key: Hashable, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        program, before = self._programs[key], compilation_counter.anew_here
        if self._store is None:
            return program.compile(lowered)
        # A module lacks the arguments that it does not use, and a program is called with all.
        arguments = [(its.shape, its.dtype.name) for its in jax.tree.leaves(lowered.args_info)]
        module = f"{program.compiler_options}\n{arguments}\n{lowered.as_text()}"
        if (found := self._store.find(key, lowered, module)) is not None:
            return found
        compiled = program.compile(lowered)
        if compilation_counter.anew_here > before:
            self._store.save(key, compiled, module)
        return compiled


class CompilationCounter:
    """Counts the compilations of this process, from JAX's monitoring events.

    JAX counts a program from the compilation cache as compiled, too.
    """

    _COMPILE = "/jax/core/compile/backend_compile_duration"
    _CACHE_HIT = "/jax/compilation_cache/cache_hits"

    def __init__(self) -> None:
        self.compiles = 0  # including cache hits
        self.cache_hits = 0
        self._of_thread = threading.local()
        # Compiling threads raise the events.
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == self._COMPILE:
            self._of_thread.anew = self.anew_here + 1
            self._of_thread.all = self.compiles_here + 1
            with self._lock:
                self.compiles += 1

    def _on_event(self, event: str, **_: Any) -> None:
        if event == self._CACHE_HIT:
            self._of_thread.anew = self.anew_here - 1
            with self._lock:
                self.cache_hits += 1

    @property
    def anew(self) -> int:
        """The number of programs that were compiled without a cache hit."""
        with self._lock:
            return self.compiles - self.cache_hits

    @property
    def compiles_here(self) -> int:
        """The number of programs that this thread has compiled, including cache hits."""
        return getattr(self._of_thread, "all", 0)

    @property
    def anew_here(self) -> int:
        """The number of programs that this thread has compiled without a cache hit. JAX compiles in
        the calling thread."""
        return getattr(self._of_thread, "anew", 0)


# Listeners cannot be removed, so there is one for the whole process.
compilation_counter = CompilationCounter()


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Compile without the cache: on a CPU at least, a program from the cache cannot be serialized
    again. When it is loaded, it lacks its functions."""
    was = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # otherwise JAX would not read the setting again
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was)
        compilation_cache.reset_cache()
