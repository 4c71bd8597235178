"""The contract of a feature's device half with the runner.

*Present per engine, conditional per step*: every program that has fields of a feature contains the
feature's computation, under a conditional on these fields. If no row of a step uses the feature,
the fields switch it off. A feature adds no program, and its first request compiles nothing.

A feature does not declare how much device memory it takes. Its temporaries are part of the
programs: the plan compiles the largest step, reads its memory use, and gives the KV cache the rest
(`programs.sizing`). So a feature must compute what grows with a step's tokens in bounded pieces.
"""

from collections.abc import Mapping
from typing import Protocol

import jax
import numpy as np

from jaxllm.models.base import Model
from jaxllm.plan.buckets import Bucket
from jaxllm.scheduler.schedule import Slice


class DeviceSlice(Protocol):
    """The device half of a feature. It has no state: the slice has all that a step needs."""

    @property
    def name(self) -> str:
        """The name of the feature's slices. The host half has the same name."""
        ...

    def fields(self, bucket: Bucket) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the feature's int32 arrays in the programs of this bucket.
        Return {} if these programs lack the feature: then no step with a slice of it may run there
        (`scheduler.features.Drafted.needs_mixed`)."""
        ...

    def pack(self, fields: Mapping[str, np.ndarray], its: Slice | None) -> None:
        """Fill the fields, which are zeros, with the slice of a Schedule. Without a slice, fill
        them with the values that switch the feature off."""
        ...

    def compute(
        self, fields: Mapping[str, jax.Array], model: Model, hidden: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the slice of the result, from the hidden states [T, D] of all tokens. The step
        traces it in a scope of the feature's name, and the host reads it if the Schedule has a
        slice of this feature. Compute under `jax.lax.cond`, so that other steps compute nothing."""
        ...
