"""The differences between the versions of JAX that the kernels run on, in one place.

Pallas for GPUs is young: names and behaviour change with almost every release of JAX.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

# ---- Keys of the compilation cache ----


@contextlib.contextmanager
def without_source_locations() -> Iterator[None]:
    """Lower programs without source locations.

    The body of a Pallas kernel is part of its program's key in the compilation cache, including the
    files and lines of all callers. So a change of line numbers, or another way to start the same
    engine, would compile everything again. Names of scopes and operations stay, and so do the
    tracebacks of errors. A kernel that is compiled on its own, as in its tests, keeps its lines.
    """
    name = "jax_traceback_in_locations_limit"
    before = jax.config.jax_traceback_in_locations_limit  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)


# ---- GPU ----

_MOSAIC_GPU_SINCE = (0, 11, 2)
_NVJITLINK_SINCE = (0, 12, 0)


def why_no_mosaic_gpu() -> str | None:
    """Why this JAX cannot compile the Mosaic GPU kernels; None if it can."""
    if jax.__version_info__ >= _MOSAIC_GPU_SINCE:
        return None
    needed = ".".join(map(str, _MOSAIC_GPU_SINCE))
    return f"needs JAX {needed} or newer, and this is {jax.__version__}"


def what_slows_mosaic_gpu() -> str | None:
    """Why the Mosaic GPU kernels may be slower with this JAX, which can compile them; None if no
    reason is known."""
    if jax.__version_info__ < _NVJITLINK_SINCE:
        return None
    # Detecting libnvJitLink is not possible here, because it need not be part of a package.
    return (
        f"JAX {jax.__version__} assembles with libnvJitLink where it finds one (jax[cuda13] "
        "installs it), which leaves kernels of prefills too few registers; JAX 0.11.2 does not"
    )


def prepare_to_load_programs(device: Any) -> None:
    """Let a process load programs for a device that another process has compiled.

    The host's code of a Mosaic kernel calls a library that XLA finds by an environment variable.
    Mosaic sets it when it is imported, which a process that traces no kernel does not do.
    """
    if device.platform == "gpu" and why_no_mosaic_gpu() is None:
        import jax.experimental.mosaic.gpu  # noqa: F401


def gpu_interpret_params() -> Any:
    """The parameters that make `plgpu.kernel` run on a CPU like on a GPU, and detect races."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]


def smem_transforms(tiling: tuple[int, int], swizzle: int | None) -> tuple[Any, ...]:
    """A layout of a matrix in a GPU's shared memory: tiles, and the swizzle of their rows."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # Type checkers take these classes for abstract ones.
    tiles = plgpu.TilingTransform(tiling)  # pyright: ignore[reportAbstractUsage]
    if swizzle is None:
        return (tiles,)
    return tiles, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def store_unoptimized(ref: Any, x: jax.Array) -> None:
    """Store registers to a GPU's memory in the pieces that their layout gives.

    JAX 0.12 does that only on request: otherwise a store must fill whole cache lines of global
    memory, or avoid bank conflicts in untiled shared memory. JAX 0.11 does it always.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = x
