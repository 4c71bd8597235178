"""Images on the host: which of them are in the pool of the device, and which a step must encode.

The pool is a cache by the images' content. An image that a step needs and that is not there is
encoded before the step, in place of those that were not used for longest. So equal images are
encoded once, for how many requests soever, and nothing must be given back: a request that goes on
inside an image after others have taken its place, or after a preemption, has it encoded again.
"""

import bisect
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.media.item import ImageItem, ImageSpec
from jaxllm.media.slice import NAME, NO_ROW, NUM_AXES
from jaxllm.scheduler.features import Drafted, Nothing
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.schedule import Encoding, Schedule, StepResult


class _Placed(NamedTuple):
    """An image of a request, and the places of its embeddings in the prompt."""

    item: ImageItem
    places: np.ndarray  # int [tokens], ascending

    def part(self, start: int, end: int) -> tuple[int, int]:
        """Which of the places are in [start, end)."""
        first, last = np.searchsorted(self.places, (start, end)).tolist()
        return first, last


class _Using(NamedTuple):
    """What the feature keeps of a request."""

    images: list[_Placed]
    # int32 [NUM_AXES, prompt + 1]: of each token, as in `media.slice`; the last column is of all
    # tokens behind the prompt. None: positions are places.
    offsets: np.ndarray | None

    def within(self, start: int, end: int) -> list[_Placed]:
        """The images that have a token in [start, end)."""
        first = bisect.bisect_right(self.images, start, key=lambda one: one.item.end)
        last = bisect.bisect_left(self.images, end, key=lambda one: one.item.start)
        return self.images[first:last]

    def offsets_of(self, start: int, end: int) -> np.ndarray:
        """Those of the tokens from `start` up to `end`."""
        assert self.offsets is not None, "positions are places"
        last = self.offsets.shape[1] - 1
        if start >= last:
            return self.offsets[:, last:]
        return self.offsets[:, np.minimum(np.arange(start, end), last)]


class Images:
    """The feature's host half."""

    name = NAME

    def __init__(self, spec: ImageSpec, num_rows: int) -> None:
        """`num_rows` are those of the pool, which holds the largest image at least."""
        self._spec = spec
        self._num_rows = num_rows
        self._free = list(range(num_rows))
        self._held: OrderedDict[bytes, list[int]] = OrderedDict()  # rows, the oldest image first
        # The images that the step under way needs, and the rows that they take.
        self._wanted: set[bytes] = set()
        self._num_wanted = 0
        self._using: dict[str, _Using] = {}

    def add(self, request: Request) -> None:
        if not request.images:
            return
        tokens = np.array(request.prompt_token_ids)
        is_embedded = np.isin(tokens, self._spec.token_ids)
        images = [
            _Placed(one, one.start + np.flatnonzero(is_embedded[one.start : one.end]))
            for one in request.images
        ]
        offsets = None
        if self._spec.has_grid_positions:
            offsets = _grid_offsets(request.images, len(tokens), self._spec.merge)
        self._using[request.request_id] = _Using(images, offsets)

    def ready(self, *, wait: bool) -> Sequence[Request]:
        self._wanted.clear()  # a step begins
        self._num_wanted = 0
        return ()

    def drop(self, request: Request) -> None:
        self._using.pop(request.request_id, None)

    def start_over(self, request: Request) -> None:
        pass  # its images are in the pool, or are encoded again

    def lose(self) -> None:
        self._held.clear()
        self._free = list(range(self._num_rows))

    def limit(self, request: Request, n: int, budget: int) -> int:
        """End the chunk before an image for which this step has no place left in the pool. No
        prompt ends with an image's embedding, so a request that wants one token wants none."""
        using = self._using.get(request.request_id)
        if using is None:
            return n
        start = request.num_tokens - n
        end = start + min(n, budget)
        if self._spec.sees_all:
            for placed in using.within(start, end)[-1:]:
                if placed.item.start < end < placed.item.end:
                    end = max(start, placed.item.start)
                    n = end - start
        for placed in using.within(start, end):
            first, last = placed.part(start, end)
            if first == last or placed.item.digest in self._wanted:
                continue
            size = len(placed.places)
            if self._num_wanted + size > self._num_rows:
                return int(placed.places[first]) - start
            self._wanted.add(placed.item.digest)
            self._num_wanted += size
        return n

    def draft(self, rows: Sequence[Request], num_tokens: np.ndarray) -> Drafted | None:
        if not self._using:
            return None
        encodings: list[Encoding] = []
        rows_given: np.ndarray | None = None
        offsets: np.ndarray | None = None
        ahead: np.ndarray | None = None
        firsts = np.cumsum(num_tokens) - num_tokens
        for row, request in enumerate(rows):
            using = self._using.get(request.request_id)
            if using is None:
                continue
            first_token, end = int(firsts[row]), request.num_computed_tokens
            start = end - int(num_tokens[row])
            if using.offsets is not None:
                if offsets is None:
                    offsets = np.zeros((NUM_AXES, int(num_tokens.sum())), np.int32)
                its_tokens = slice(first_token, first_token + end - start)
                offsets[:, its_tokens] = using.offsets_of(start, end)
            for placed in using.within(start, end):
                first, last = placed.part(start, end)
                if first == last:
                    continue
                its = self._rows_of(placed, encodings)
                if rows_given is None:
                    rows_given = np.full(int(num_tokens.sum()), NO_ROW, np.int32)
                where = placed.places[first:last] - start + first_token
                rows_given[where] = its[first:last]
                if self._spec.sees_all:
                    if ahead is None:
                        ahead = np.zeros(len(rows_given), np.int32)
                    ahead[where] = placed.item.end - 1 - placed.places[first:last]
        given = {"rows": rows_given, "ahead": ahead, "offsets": offsets}
        found = {name: array for name, array in given.items() if array is not None}
        if not found:
            return None
        needs_mixed = rows_given is not None
        return Drafted(found, needs_mixed=needs_mixed, wants_logits=False, encodings=encodings)

    def read(
        self, schedule: Schedule, result: StepResult, rows: Sequence[Request | None]
    ) -> Nothing:
        return Nothing()

    def _rows_of(self, placed: _Placed, encodings: list[Encoding]) -> list[int]:
        """The rows of the pool that have the image, which is encoded unless it is there."""
        item, size = placed.item, len(placed.places)
        if item.digest in self._held:
            self._held.move_to_end(item.digest)
            return self._held[item.digest]
        while len(self._free) < size:
            oldest = next(one for one in self._held if one not in self._wanted)
            self._free += self._held.pop(oldest)
        rows, self._free = self._free[:size], self._free[size:]
        self._held[item.digest] = rows
        encodings.append(
            Encoding(
                rows=item.rows,
                columns=item.columns,
                pixels=np.frombuffer(item.pixels, np.uint8),
                pool_rows=np.array(rows, np.int32),
            )
        )
        return rows


def _grid_offsets(images: Sequence[ImageItem], num_tokens: int, merge: int) -> np.ndarray:
    """`_Using.offsets` of a prompt. All tokens of an image have one position in time, and those in
    its rows and columns from there on. The text behind an image goes on after its longer edge; that
    behind a video whose positions tell the time, also after its last pair of frames."""
    offsets = np.empty((NUM_AXES, num_tokens + 1), np.int32)
    before = delta = position = 0
    for one in images:
        offsets[:, before : one.start] = delta
        if not one.continues:
            position = one.start + delta
        rows, columns = one.rows // merge, one.columns // merge
        index = np.arange(rows * columns)
        of_axes = np.stack([np.full_like(index, one.time), index // columns, index % columns])
        offsets[:, one.start : one.end] = position + of_axes - one.start - index
        before, delta = one.end, position + max(one.time + 1, rows, columns) - one.end
    offsets[:, before:] = delta
    return offsets
