"""What the scheduler asks of a feature: the host half of a package with a slice of every step.

A feature adds its slice to a `Schedule` while the step is drafted, its device half
(`runner.slices`) computes something for it, and what comes back as its slice of the `StepResult`
becomes part of the outputs. Neither half knows the other, nor do features know each other.

Rules for all methods: they never raise, and they never wait. `draft` and `read` are called in every
step that concerns them: nothing there may cost more than the feature's own rows deserve, and a
request that does not use the feature pays nothing.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxllm.messages import EngineOutput
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.schedule import Schedule, Slice, StepResult


class Drafted(NamedTuple):
    """A feature's part of a Schedule."""

    # It travels to other hosts, and comes back to `Feature.read` unchanged.
    slice: Slice
    # Whether the step needs a program for mixed steps, even if all of its rows are decodes.
    needs_mixed: bool
    # Whether the logits after the last token of each row are to come to the host.
    wants_logits: bool


class Brought(Protocol):
    """What a feature has found in a step's result."""

    @property
    def corrupted(self) -> Iterable[int]:
        """Rows that end with an error: what the device has computed for them is no numbers."""
        ...

    @property
    def rows(self) -> Iterable[int]:
        """Rows with something for their requests."""
        ...

    def add_to(self, output: EngineOutput, row: int) -> None:
        """Put what one of `rows` has brought in the output of its request. It has one even if the
        row samples no token."""
        ...


class Feature(Protocol):
    """The host half of a feature. It may keep something for each request that uses it."""

    @property
    def name(self) -> str:
        """Of the feature's slices; the device half has the same."""
        ...

    def add(self, request: Request) -> None:
        """A request has come. If some tokens must be computed by the request itself, and not be
        found in the cache, raise `request.num_cache_bars` by one, and lower it once they are on
        their way."""
        ...

    def drop(self, request: Request) -> None:
        """A request has ended: forget it. Steps with rows of it may still be under way."""
        ...

    def limit(self, request: Request, n: int, budget: int) -> int:
        """Return how many of `n` tokens a request may compute in a step, at least one: the first of
        the limits that are applied (`scheduler.limits`)."""
        ...

    def draft(self, rows: Sequence[Request], num_tokens: np.ndarray) -> Drafted | None:
        """Return the slice of a step with these rows, or None if no row uses the feature.

        Row r computes the `num_tokens[r]` tokens before `rows[r].num_computed_tokens`; i32 [rows].
        The rows' tokens lie one after another. The step is certain to be dispatched.
        """
        ...

    def read(
        self, schedule: Schedule, result: StepResult, rows: Sequence[Request | None]
    ) -> Brought:
        """Take in the result of a step that has a slice of this feature. Steps come back in the
        order in which they were drafted; those that failed do not. A row is None where its
        request has started over since, and its request may have ended."""
        ...
