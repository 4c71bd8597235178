"""`jaxllm collect-env`: the facts about the machine that a bug report needs.

It prints only named facts and no environment variables, so that the output can be published.
"""

import argparse
import importlib.metadata
import os
import platform
from pathlib import Path

import jaxllm
from jaxllm.config import CompilationConfig
from jaxllm.plural import counted

PACKAGES = (
    "jax", "jaxlib", "flax", "transformers", "tokenizers", "safetensors", "numpy",
    "ml_dtypes", "msgspec", "libtpu", "jax-cuda13-plugin", "torch",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: this command has no arguments of its own."""


def run(args: argparse.Namespace) -> None:
    rows = {"jaxllm": jaxllm.__version__, "python": platform.python_version()}
    rows |= versions() | machine() | {"compile cache": compile_cache()}
    width = max(map(len, rows))
    # Print the known facts first, because jax may take long to find its devices, or fail.
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows.items()), flush=True)
    print(f"{'devices':<{width}}  {devices()}")


def versions() -> dict[str, str]:
    """The installed versions of the packages that matter."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, str]:
    """Operating system, processor and memory."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": f"{os.cpu_count()} ({usable} usable)",
        "memory": f"{memory / 2**30:.1f} GiB",
    }


def compile_cache() -> str:
    """The default directory of compiled programs, and its size."""
    path = CompilationConfig().compilation_cache_dir
    assert path, "the default config names a directory"
    files = [entry for entry in Path(path).expanduser().rglob("*") if entry.is_file()]
    size = sum(entry.stat().st_size for entry in files)
    return f"{path} ({counted(len(files), 'file')}, {size / 2**20:.1f} MiB)"


def devices() -> str:
    """The devices that jax sees, or why it sees none."""
    try:
        import jax

        from jaxllm.runner.jax_setup import leave_out_absent_tpu

        leave_out_absent_tpu()
        found = jax.devices()
    except (ImportError, RuntimeError) as error:
        return f"none: {' '.join(str(error).split())}"
    kinds = [device.device_kind for device in found]
    counts = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    return f"{found[0].platform}: {counts}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
