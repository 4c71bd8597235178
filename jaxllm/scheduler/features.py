"""The contract of a feature's host half with the scheduler.

A feature adds its slice to a `Schedule` while the scheduler drafts the step. Its device half
(`runner.slices`) computes from that slice. The feature's slice of the `StepResult` becomes part of
the outputs. The halves do not know each other, and a feature knows no other feature.

No method may raise, or wait unless it is told to. The scheduler calls `ready` and `draft` for every
step, and `read` for every step with a slice of the feature. A request that does not use the feature
pays nothing there.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxllm.messages import EngineOutput
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.schedule import AdapterWrite, Encoding, Schedule, Slice, StepResult


class Drafted(NamedTuple):
    """A feature's part of a Schedule."""

    # It may travel to other hosts. `Feature.read` gets it back unchanged.
    slice: Slice
    # Whether the step needs a program for mixed steps even if all its rows are decodes.
    needs_mixed: bool
    # Whether the host needs the logits after the last token of each row.
    wants_logits: bool
    # Rows that sample late (`Schedule.late_rows`), under masks of the feature. One feature of an
    # engine may have such rows.
    late_rows: np.ndarray | None = None
    # What takes slots of the device before the step (`Schedule.adapter_writes`).
    adapter_writes: Sequence[AdapterWrite] = ()
    # What is encoded before the step (`Schedule.encodings`).
    encodings: Sequence[Encoding] = ()


class Brought(Protocol):
    """A feature's part of a step's result, by row."""

    @property
    def corrupted(self) -> Iterable[int]:
        """Rows whose requests end with an error, since the device computed NaN or infinities."""
        ...

    @property
    def failed(self) -> Mapping[int, str]:
        """Rows whose requests end with this error. Their tokens are dropped."""
        ...

    @property
    def complete(self) -> Iterable[int]:
        """Rows whose requests end with the token that they have sampled."""
        ...

    @property
    def rows(self) -> Iterable[int]:
        """Rows that add something to the output of their request."""
        ...

    def add_to(self, output: EngineOutput, row: int) -> None:
        """Add the result of one of `rows` to the output of its request. The request gets an output
        even if the row samples no token."""
        ...


class Nothing:
    """What a feature has brought whose rows add nothing to outputs."""

    corrupted: Iterable[int] = ()
    failed: Mapping[int, str] = {}
    complete: Iterable[int] = ()
    rows: Iterable[int] = ()

    def add_to(self, output: EngineOutput, row: int) -> None:
        raise AssertionError("no row adds anything")


class Feature(Protocol):
    """The host half of a feature. It may keep state for each request that uses it."""

    @property
    def name(self) -> str:
        """The name of the feature's slices. The device half has the same name."""
        ...

    def add(self, request: Request) -> None:
        """Note a new request. If the request must compute some tokens itself instead of finding
        them in the prefix cache, add one to `request.num_cache_bars`, and subtract it once these
        tokens are dispatched. If it may not run yet, add one to `request.num_holds`, and return it
        from `ready` later."""
        ...

    def ready(self, *, wait: bool) -> Iterable[Request]:
        """Return the requests that the feature has held and holds no longer. With `wait`, which
        says that no request can run, wait for one if the feature holds any."""
        ...

    def drop(self, request: Request) -> None:
        """Forget a request that has ended. Steps with rows of it may still be in flight."""
        ...

    def start_over(self, request: Request) -> None:
        """Note that the request computes all its tokens again, and that the results of its rows in
        flight are dropped. What has been read stays. Bar it from the prefix cache as in `add`."""
        ...

    def limit(self, request: Request, n: int, budget: int) -> int:
        """Return how many of `n` tokens a request may compute in a step. These limits come before
        those of `scheduler.limits`. A feature that gives none must give some once it has what this
        step's other requests hold of it."""
        ...

    def lose(self) -> None:
        """Note that all that the device holds is lost. No request runs."""
        ...

    def draft(self, rows: Sequence[Request], num_tokens: np.ndarray) -> Drafted | None:
        """Return the slice of a step with these rows, or None if no row uses the feature.

        `num_tokens` is i32 [rows]: row r computes the `num_tokens[r]` tokens that end at
        `rows[r].num_computed_tokens`. The tokens of the rows lie one after another. The step is
        certain to be dispatched.
        """
        ...

    def read(
        self, schedule: Schedule, result: StepResult, rows: Sequence[Request | None]
    ) -> Brought:
        """Read the result of a step that has a slice of this feature. Steps come back in the order
        in which they were drafted; failed steps do not come back. A row is None if its request has
        started over since. The request of a row may have ended."""
        ...


class Gate(Feature, Protocol):
    """A feature with slots of its own on the device, which some requests need while they run. An
    engine has one or none."""

    def admits(self, request: Request) -> bool:
        """Whether a waiting request may run now. If not, the feature holds it, as in `add`, and
        others overtake it."""
        ...

    def admitted(self, request: Request) -> int:
        """Note that a request runs from now on. Return its slot (`Admission.adapter`)."""
        ...

    def left(self, request: Request) -> None:
        """Note that a request runs no longer: it has ended, or was preempted."""
        ...
