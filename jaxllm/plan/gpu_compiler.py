"""What an engine tells XLA about GPUs: tiles of matrix products, and what is launched at once.

**Tiles.** XLA times several tiles for each product on the GPU that it compiles for, and takes the
fastest. If that GPU is not there, as when a bundle is made elsewhere, it takes tiles from a
formula, and they may be slow. A file with the results of an earlier timing takes the place of the
GPU.

**Graphs.** A step is one CUDA graph, with its conditionals and loops. A driver that does not take
conditionals in conditionals, or takes long to update a graph whose addresses have moved, can be
served with less: `gpu_graphs`.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
from jaxllm_kernels.platform import Chip

from jaxllm.config import CompilationConfig
from jaxllm.errors import refused
from jaxllm.logging import init_logger

logger = init_logger(__name__)

# What XLA may put into graphs, by the value of gpu_graphs. "whole" is in the chip's options.
_GRAPHS = {
    "whole": (),
    "flat": (
        (
            "xla_gpu_enable_command_buffer",
            "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION",
        ),
    ),
    "off": (("xla_gpu_enable_command_buffer", ""),),
}

UNTIMED = "from a formula, not timed"
TIMED = "timed by the compiler"


@dataclass(frozen=True)
class AutotuneResults:
    """A file of XLA's. Programs are made of its content, so its place is not in its text."""

    path: str = field(repr=False, compare=False)
    digest: str

    @classmethod
    def read(cls, path: str, chip: Chip) -> "AutotuneResults":
        if chip.platform != "gpu":
            raise refused(
                "gpu_autotune_results", path, f"they are of GPUs, and this is {chip.name}"
            )
        file = Path(path).expanduser().resolve()
        try:
            content = file.read_bytes()
        except OSError as error:
            raise refused("gpu_autotune_results", path, f"it cannot be read ({error})") from error
        return cls(str(file), hashlib.sha256(content).hexdigest()[:16])

    @property
    def compiler_options(self) -> tuple[tuple[str, str], ...]:
        return (("xla_gpu_load_autotune_results_from", self.path),)


def when_to_compile(asked: CompilationConfig, chip: Chip) -> Literal["ahead", "behind", "late"]:
    """When programs are compiled: before the first step, behind steps, or when one is needed.
    Beside steps the times of products would be wrong."""
    if asked.enforce_eager:
        return "late"
    if not asked.compile_behind:
        return "ahead"
    if chip.platform == "gpu":
        logger.info("compile_behind: %s times products, so all is compiled before", chip.name)
        return "ahead"
    return "behind"


def graph_options(graphs: str, chip: Chip) -> tuple[tuple[str, str], ...]:
    """The compiler options of a value of gpu_graphs."""
    return _GRAPHS[graphs] if chip.platform == "gpu" else ()


def tiles_of(chip: Chip, device: Any, results: AutotuneResults | None) -> str | None:
    """Where the tiles of programs come from that are compiled for a device, which may be absent;
    None if the chip's compiler times nothing."""
    if chip.platform != "gpu":
        return None
    timed = TIMED if device in jax.devices() else UNTIMED
    return timed if results is None else f"{results.digest}, and others {timed}"
