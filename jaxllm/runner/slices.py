"""What the device side asks of a feature: the device half of a package with a slice of every step.

*Present per engine, conditional per step*: what a feature computes is part of every program that
has a field of it, behind a conditional on its fields, and where no row of a step uses it the fields
say so. A feature adds no program, and nothing is compiled when the first request uses it.

Nobody declares what a feature takes of the devices' memory. Its temporaries are those of the
programs: the plan compiles the largest step, asks it, and gives the KV cache what is left
(`programs.sizing`). So what grows with a step's tokens is computed in pieces of bounded size.
"""

from collections.abc import Mapping
from typing import Protocol

import jax
import numpy as np

from jaxllm.models.base import Model
from jaxllm.plan.buckets import Bucket
from jaxllm.scheduler.schedule import Slice


class DeviceSlice(Protocol):
    """The device half of a feature. It has no state: all that a step needs is in the slice."""

    @property
    def name(self) -> str:
        """Of the feature's slices; the host half has the same."""
        ...

    def fields(self, bucket: Bucket) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the int32 arrays that the programs of this bucket get. None
        if the feature is not in them: then no step with a slice of it may run there
        (`scheduler.features.Drafted.needs_mixed`)."""
        ...

    def pack(self, fields: Mapping[str, np.ndarray], its: Slice | None) -> None:
        """Fill the fields, which are zeros, with the slice of a Schedule; without one, with what
        switches the feature off."""
        ...

    def compute(
        self, fields: Mapping[str, jax.Array], model: Model, hidden: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the slice of the result, from the hidden states [T, D] of all tokens; traced, in a
        scope of the feature's name. It comes to the host if the Schedule has a slice of this
        feature. Under `jax.lax.cond`, so that a step without one computes nothing."""
        ...
