"""Facts about chips, by which plans and implementations choose.

A platform is the value of `jax.Device.platform`: "cpu", "gpu" or "tpu". A chip is one JAX device: a
whole TPU chip, except where each core of a chip is a device (v7x).
"""

import functools
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A jax.Device. Type checkers take that name for a variable.
Device = Any

# Default tokens per KV block. On a CPU the XLA attention backend takes one
# block per iteration: in processor time of a decode (benchmarks/attention_xla.py, two cores),
# blocks of 16 cost 1.7 to 1.9 times those of 64, and blocks of 32 cost 1.0 to 1.2 times. Prompts
# share smaller blocks more often.
DEFAULT_BLOCK_SIZES = {"cpu": 32, "gpu": 64, "tpu": 64}

# Rows that a matrix product needs to avoid a slow path. With 16-bit weights XLA:CPU
# multiplies one row ten times slower than two.
MIN_DOT_ROWS = {"cpu": 2, "gpu": 1, "tpu": 1}

# The multiple of elements that rows of a table have if single rows of it are looked up. An argument
# on a TPU has the layout that pads less: by columns, if rows are no multiple of the 128 lanes of a
# vector register. A program would copy such a table in each run, to look its rows up.
TABLE_ROW_MULTIPLES = {"cpu": 1, "gpu": 1, "tpu": 128}

# The platforms whose compilers divide the tuning of a program among the processes that compile it.
TUNED_TOGETHER = frozenset({"gpu"})

# Operations that XLA:GPU may record in a command buffer (CUDA graph). Its default lacks loops: the
# host would launch every iteration, after it has waited for the loop's condition.
_COMMAND_BUFFER = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
_GPU_OPTIONS = (
    ("xla_gpu_enable_command_buffer", _COMMAND_BUFFER),
    # If weights and cache take more than four fifths of the memory, XLA assumes that no memory is
    # left, and recomputes values that it could keep: 29 more launches in two layers of Llama-8B.
    # Caches are sized so that its temporaries fit.
    ("xla_disable_hlo_passes", "rematerialization"),
)

_GPU_OPTIONS_OF_MANY_TOKENS = (
    # Otherwise XLA cuts the sums of most products of few rows into four or eight parts, to fill a
    # GPU with tiles. Another launch adds the parts up, after they were written in float32: 22 MiB a
    # layer for 64 rows of a Llama-8B. Measured on an H200, of eight such layers: without parts, a
    # decode of 64 takes 0.97 of the time, and a prompt of 1024 too. A decode of one takes 1.04.
    ("xla_gpu_experimental_force_split_k", "1"),
)

# Rows that the smallest tile of a matrix product has on a GPU. So products of fewer take the same
# time, and of them what was measured for one row holds.
_FEW_TOKENS = 16

# JAX sets this flag in the environment of a TPU VM only. Setting it here makes programs for TPUs
# the same wherever they are compiled.
_TPU_OPTIONS = (("xla_tpu_use_enhanced_launch_barrier", "true"),)


def _large_fusions(mebibytes: int) -> tuple[tuple[str, str], ...]:
    """The option for how much VMEM a fusion may take.

    With the default, XLA reads the activations of an MLP again for every other tile of its
    products. Two layers of Llama-8B and the head take fewer cycles with more, as the compiler
    estimates them: of 1024 and 2048 tokens 9 to 15 % fewer on v5e and v6e with 64 MiB, 12 and 14 %
    on v7x and v5p with 48; of 64 tokens 1.5 % fewer on v6e, 10 and 26 % on v7x and v5p. With
    96 MiB, v6e has too little left for prefetched weights: of 64 tokens it takes 3 % more.
    """
    return (("xla_tpu_scoped_vmem_limit_kib", str(mebibytes << 10)),)


_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Chip:
    """The properties of a JAX device; zero if a property does not exist or is not needed."""

    name: str
    platform: str
    # Memory for programs. On TPU: the TPU compiler's limit, which is less than in the data sheet.
    # On GPU: the rest beside driver and context.
    hbm_bytes: int = 0
    # Peak rates, from the makers' data sheets.
    hbm_bytes_per_second: float = 0
    bf16_flops_per_second: float = 0
    # From a device to its neighbours, over all of its links together. A small slice of TPUs, which
    # is not a torus, does not use all links.
    link_bytes_per_second: float = 0
    # The number of JAX devices of a chip.
    devices_per_chip: int = 1
    # TensorCores of a device of a TPU, streaming multiprocessors of a GPU.
    num_cores: int = 1
    # Memory of a core that a kernel manages by hand: VMEM of a TPU, shared memory of a GPU.
    vmem_bytes: int = 0
    # Scalar memory of a TPU core.
    smem_bytes: int = 0
    # The compute capability of an NVIDIA GPU: (9, 0) is Hopper.
    compute_capability: tuple[int, int] | None = None
    # The compiler options of programs for this chip, in addition to XLA's defaults.
    compiler_options: tuple[tuple[str, str], ...] = ()
    # Those of steps of many tokens, in addition.
    options_of_many_tokens: tuple[tuple[str, str], ...] = ()

    @property
    def is_hopper(self) -> bool:
        """Whether it is a GPU for which our own kernels are written."""
        return self.platform == "gpu" and (self.compute_capability or (0,))[0] == 9

    def step_options(self, num_tokens: int) -> tuple[tuple[str, str], ...]:
        """What steps of a number of tokens have beside `compiler_options`."""
        return self.options_of_many_tokens if num_tokens > _FEW_TOKENS else ()


# XLA for CPUs has a second implementation of what has reductions, and takes it for arrays of many
# rows. It computes other bits. These options leave it out.
OPTIONS_OF_FIXED_ORDER = (("xla_cpu_experimental_ynn_fusion_type", ""),)

CHIPS = {
    chip.name: chip
    for chip in (
        Chip(name="cpu", platform="cpu"),
        Chip(
            name="v4",
            platform="tpu",
            hbm_bytes=int(30.75 * _GIB),
            hbm_bytes_per_second=1.23e12,
            bf16_flops_per_second=275e12,
            link_bytes_per_second=300e9,
            num_cores=2,
            vmem_bytes=16 * _MIB,
            smem_bytes=_MIB,
            compiler_options=_TPU_OPTIONS,
        ),
        Chip(
            name="v5e",
            platform="tpu",
            hbm_bytes=int(15.75 * _GIB),
            hbm_bytes_per_second=0.82e12,
            bf16_flops_per_second=197e12,
            link_bytes_per_second=200e9,
            vmem_bytes=128 * _MIB,
            smem_bytes=_MIB,
            compiler_options=_TPU_OPTIONS + _large_fusions(64),
        ),
        Chip(
            name="v5p",
            platform="tpu",
            hbm_bytes=int(95.73 * _GIB),
            hbm_bytes_per_second=2.765e12,
            bf16_flops_per_second=459e12,
            link_bytes_per_second=600e9,
            num_cores=2,
            vmem_bytes=64 * _MIB,
            smem_bytes=_MIB,
            compiler_options=_TPU_OPTIONS + _large_fusions(48),
        ),
        Chip(
            name="v6e",
            platform="tpu",
            hbm_bytes=int(31.24 * _GIB),
            hbm_bytes_per_second=1.64e12,
            bf16_flops_per_second=920e12,
            link_bytes_per_second=400e9,
            vmem_bytes=128 * _MIB,
            smem_bytes=_MIB,
            compiler_options=_TPU_OPTIONS + _large_fusions(64),
        ),
        Chip(
            name="v7x",
            platform="tpu",
            hbm_bytes=int(94.74 * _GIB),
            hbm_bytes_per_second=3.69e12,
            bf16_flops_per_second=1155e12,
            link_bytes_per_second=600e9,
            devices_per_chip=2,
            compiler_options=(
                *_TPU_OPTIONS,
                *_large_fusions(48),
                # Otherwise XLA gives some uses of a 16-bit weight another layout, and copies it.
                ("xla_tpu_control_large_2nd_minor_layout_for_x16", "false"),
            ),
            vmem_bytes=64 * _MIB,
            smem_bytes=_MIB,
        ),
        Chip(
            name="h200",
            platform="gpu",
            hbm_bytes=139 * _GIB,
            hbm_bytes_per_second=4.8e12,
            bf16_flops_per_second=989e12,
            link_bytes_per_second=450e9,
            num_cores=132,
            vmem_bytes=227 * 1024,
            compute_capability=(9, 0),
            compiler_options=_GPU_OPTIONS,
            options_of_many_tokens=_GPU_OPTIONS_OF_MANY_TOKENS,
        ),
        Chip(
            name="h100",
            platform="gpu",
            hbm_bytes=79 * _GIB,
            hbm_bytes_per_second=3.35e12,
            bf16_flops_per_second=989e12,
            link_bytes_per_second=450e9,
            num_cores=132,
            vmem_bytes=227 * 1024,
            compute_capability=(9, 0),
            compiler_options=_GPU_OPTIONS,
            options_of_many_tokens=_GPU_OPTIONS_OF_MANY_TOKENS,
        ),
    )
}

_DEVICE_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
}


def chip_of(device: Device) -> Chip:
    """Return the chip of a device, real or of a compile-only topology.

    A chip that the table lacks has the device's name and the facts that the device reports.
    """
    if device.platform == "cpu":
        return CHIPS["cpu"]
    if name := _DEVICE_KINDS.get(device.device_kind):
        return CHIPS[name]
    capability = getattr(device, "compute_capability", None)
    return Chip(
        name=device.device_kind,
        platform=device.platform,
        compiler_options={"gpu": _GPU_OPTIONS, "tpu": _TPU_OPTIONS}.get(device.platform, ()),
        options_of_many_tokens=_GPU_OPTIONS_OF_MANY_TOKENS if device.platform == "gpu" else (),
        num_cores=getattr(device, "core_count", 1),
        compute_capability=_version(capability) if capability else None,
    )


def _version(capability: str) -> tuple[int, int]:
    major, minor = str(capability).split(".")
    return int(major), int(minor)


@functools.cache
def processor() -> str:
    """This machine's processor and its instruction sets. Programs for a CPU use all of them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    facts = sorted({line for line in lines if line.startswith(names)})
    return f"{platform.machine()} {' '.join(facts) or platform.processor()}"
