"""Devices that need not exist: a chip's compiler accepts them in place of real ones.

A TPU slice needs libtpu (`pip install jax[tpu]`). A GPU needs the wheels of jax's CUDA plugin and
CUDA's compiler. Neither needs the hardware. Only one process at a time can use libtpu, unless
ALLOW_MULTIPLE_LIBTPU_LOAD=1 is in the environment. Programs for such devices can be lowered,
compiled and inspected, but not run.
"""

from importlib import resources
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from jaxllm_kernels.platform import Device


class _Slice(NamedTuple):
    """libtpu's name for a slice."""

    topology: str
    # Without this, a slice with more chips than a default host becomes several hosts.
    chips_per_host: tuple[int, int, int] | None = None
    # v4 and v5p count cores, and show both cores of a chip as one device in this mode.
    chip_config: str | None = None


# Google Cloud's names. A host has up to 8 chips of v5e and v6e, 4 of the others.
_TPU_SLICES = {
    "v4-8": _Slice("v4:2x2x1", chip_config="megacore"),
    "v4-16": _Slice("v4:2x2x2", chip_config="megacore"),
    "v5e-1": _Slice("v5e:1x1", (1, 1, 1)),
    "v5e-4": _Slice("v5e:2x2", (2, 2, 1)),
    "v5e-8": _Slice("v5e:2x4", (2, 4, 1)),
    "v5p-8": _Slice("v5p:2x2x1"),
    "v5p-16": _Slice("v5p:2x2x2"),
    "v6e-1": _Slice("v6e:1x1", (1, 1, 1)),
    "v6e-4": _Slice("v6e:2x2", (2, 2, 1)),
    "v6e-8": _Slice("v6e:2x4", (2, 4, 1)),
    "v6e-16": _Slice("v6e:4x4"),
    "v6e-32": _Slice("v6e:4x8"),
    "v6e-64": _Slice("v6e:8x8"),
    "v7x-8": _Slice("tpu7x:2x2x1"),
    "v7x-16": _Slice("tpu7x:2x2x2"),
    "v7x-32": _Slice("tpu7x:2x2x4"),
}
_GPUS = ("h200",)


def topology_names() -> tuple[str, ...]:
    """The names that `topology_devices` accepts."""
    return (*_TPU_SLICES, *_GPUS, "cpu")


def topology_devices(name: str) -> list[Device]:
    """The devices of a TPU slice ("v6e-8"), of one GPU or several ("h200", "h200-8"), or of this
    machine's "cpu", which are real."""
    if name == "cpu":
        return jax.devices("cpu")
    if name in _TPU_SLICES:
        topology, chips_per_host, chip_config = _TPU_SLICES[name]
        options: dict[str, Any] = {}
        if chips_per_host is not None:
            options["chips_per_host_bounds"] = list(chips_per_host)
        if chip_config is not None:
            options["chip_config_name"] = chip_config
        return topologies.get_topology_desc(
            platform="tpu", topology_name=topology, **options
        ).devices
    gpu, _, count = name.partition("-")
    if gpu not in _GPUS or not (count or "1").isdigit():
        raise ValueError(f"no topology is named {name!r}; known are {', '.join(topology_names())}")
    target = resources.files("jaxllm_kernels") / "targets" / f"{gpu}.txtpb"
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=target.read_text(),
        topology=f"1x{count or 1}x1",
    ).devices
