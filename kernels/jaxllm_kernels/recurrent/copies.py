"""Copies states between two arrays of them, such as those of slots and snapshots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
from jax import lax

from jaxllm_kernels.recurrent.tpu_blocks import chip_named, interpreter


class StateCopies(Protocol):
    """An implementation. It is a static argument of jitted functions: a frozen dataclass."""

    @property
    def name(self) -> str:
        """For logs and reports."""
        ...

    def __call__(
        self,
        sources: Sequence[jax.Array],
        targets: Sequence[jax.Array],
        pairs: jax.Array,
        count: jax.Array,
    ) -> list[jax.Array]:
        """Return the targets, updated in place.

        Args:
          sources, targets: [S, ...], of equal shapes but for S.
          pairs: int32 [M, 2]. What place pairs[i, 0] of each source has is copied to place
            pairs[i, 1] of its target. These places of targets differ.
          count: int32 [], of how many pairs. Others are anything.
        """
        ...


@dataclass(frozen=True)
class XlaCopies:
    """`StateCopies` on every platform: a loop, which changes its arrays in place."""

    name: str = "xla"

    def __call__(
        self,
        sources: Sequence[jax.Array],
        targets: Sequence[jax.Array],
        pairs: jax.Array,
        count: jax.Array,
    ) -> list[jax.Array]:
        def copy_one(index: jax.Array, targets: list[jax.Array]) -> list[jax.Array]:
            source, target = pairs[index]
            return [
                lax.dynamic_update_slice_in_dim(
                    array, lax.dynamic_slice_in_dim(its, source, 1), target, 0
                )
                for its, array in zip(sources, targets, strict=True)
            ]

        return lax.fori_loop(0, count, copy_one, list(targets))


@dataclass(frozen=True, kw_only=True)
class TpuCopies:
    """`StateCopies` on TPUs, from HBM to HBM.

    XLA cannot partition a Pallas call: with several devices, call it within a shard_map.
    """

    # The chip to compile for, or to emulate.
    chip: str
    name: str = "tpu"
    # Emulate the kernel on a CPU, with a race detector.
    interpret: bool = False

    def __call__(
        self,
        sources: Sequence[jax.Array],
        targets: Sequence[jax.Array],
        pairs: jax.Array,
        count: jax.Array,
    ) -> list[jax.Array]:
        # Importing Pallas takes long, and other platforms do not need it.
        from jaxllm_kernels.recurrent.tpu_slots import copy_slots

        emulated = interpreter(chip_named(self.chip), self.interpret)
        return copy_slots(sources, targets, pairs, count, interpret=emulated)
