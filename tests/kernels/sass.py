"""What an assembler says of GPU kernels, and their machine code, compiled without a GPU.

It needs JAX's CUDA plugin and the compiler's wheels, no driver: pip install --no-deps
jax-cuda13-plugin jax-cuda13-pjrt (of JAX's version) nvidia-cuda-nvcc nvidia-nvvm
nvidia-cuda-nvdisasm. Without nvidia-nvjitlink: JAX 0.12 would assemble with that, and it leaves
every warpgroup the registers that it starts with.
"""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from jaxllm_kernels.compat import why_no_mosaic_gpu


def tools_dir() -> Path | None:
    """Where the wheels keep ptxas and nvdisasm."""
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for found in Path(location).glob("*/bin/nvdisasm"):
            if (found.parent / "ptxas").exists():
                return found.parent
    return None


def why_no_assembler() -> str | None:
    if why := why_no_mosaic_gpu():
        return f"the Mosaic GPU backend {why}"
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "needs jax-cuda13-plugin and jax-cuda13-pjrt"
    if tools_dir() is None:
        return "needs nvidia-cuda-nvcc, nvidia-nvvm and nvidia-cuda-nvdisasm"
    return None


@dataclass(frozen=True)
class Kernels:
    """The kernels of a program."""

    code: dict[str, str]  # of the machine, by kernel
    spills: dict[str, int]  # bytes
    registers: dict[str, int]  # per thread, at the start
    register_changes: dict[str, tuple[int, int]]  # to how many: computing, producing
    is_serialized: bool  # whether the assembler lets no two matrix products overlap

    @classmethod
    def of(cls, hlo: str, log: str) -> "Kernels":
        """Those of a compiled program, of which the assembler has printed this."""
        messages, code = _printed(hlo, log)
        return cls(
            code=code,
            spills=_numbers(messages, r"(\d+) bytes spill stores, \d+ bytes spill loads"),
            registers=_numbers(messages, r"Used (\d+) registers"),
            register_changes=_register_changes(code),
            is_serialized="wgmma.mma_async instructions are serialized" in log,
        )

    def assert_registers_suffice(self, name: str, num_computing: int) -> None:
        """No warpgroup of a kernel waits for more registers than its thread block has."""
        assert name in self.register_changes, f"setmaxnreg of {name} was ignored"
        taken, kept = self.register_changes[name]
        assert num_computing * taken + kept <= (num_computing + 1) * self.registers[name]


def matrix_shapes(code: str) -> set[str]:
    """The shapes of the matrix instructions in a kernel's machine code."""
    return set(re.findall(r"HGMMA\.(\d+x\d+x\d+)", code))


# By the kernel's hash: what the assembler said, and the machine code. From JAX 0.12 on a process
# compiles, and prints, a kernel once, whatever is cleared: several shapes have the same merge.
_PRINTED: dict[str, tuple[str, str]] = {}


def _printed(hlo: str, log: str) -> tuple[dict[str, str], dict[str, str]]:
    """The assembler's messages and the machine code of each kernel of a program."""
    messages = _sections(log, r"Compiling entry function '(\w+)_mosaic_gpu_kernel'")
    code = _sections(log, r"\.text\.(\w+)_mosaic_gpu_kernel:")
    hashes = {}
    for line in hlo.splitlines():
        kernel_hash = re.search(r'kernel_hash = "((?:[^"\\]|\\.)*)"', line)
        name = re.search(r'op_name="[^"]*/(\w+)/\w+"', line)
        if kernel_hash and name:
            hashes[name[1]] = kernel_hash[1]
    _PRINTED.update({hashes[name]: (messages[name], code[name]) for name in messages})
    found = {name: _PRINTED[kernel_hash] for name, kernel_hash in hashes.items()}
    return {name: of[0] for name, of in found.items()}, {name: of[1] for name, of in found.items()}


def _sections(log: str, start: str) -> dict[str, str]:
    sections = re.split(start, log)[1:]
    return dict(zip(sections[::2], sections[1::2], strict=True))


def _numbers(messages: dict[str, str], pattern: str) -> dict[str, int]:
    found = {name: re.search(pattern, text) for name, text in messages.items()}
    return {name: int(match[1]) for name, match in found.items() if match}


def _register_changes(code: dict[str, str]) -> dict[str, tuple[int, int]]:
    """What setmaxnreg asks for in the machine code of each kernel."""
    changes = {}
    for name, instructions in code.items():
        taken = re.search(r"USETMAXREG\.TRY_ALLOC\S* \S+ (0x\w+)", instructions)
        kept = re.search(r"USETMAXREG\.DEALLOC\S* (0x\w+)", instructions)
        if taken and kept:
            changes[name] = int(taken[1], 16), int(kept[1], 16)
    return changes
