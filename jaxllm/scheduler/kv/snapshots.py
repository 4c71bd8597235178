"""Snapshots: copies of the states of recurrent layers, from which other requests go on.

Blocks have a prefix's keys and values, and a snapshot has its state: a prefix is found where there
are both. The device has a place for each snapshot. A step copies states into places after its rows
have run, and places into the slots of admitted requests before. So a place may pass on as soon as
another snapshot needs it, even to a step that still reads the old one: it reads first.

A row ends where a snapshot is wanted: at the last multiple of the stride that it reaches, and where
its prompt parts from those that others have computed. So a prefix that several requests share has
one at its very end from its second use on.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxllm.cache_groups import StateSnapshots
from jaxllm.scheduler.kv.tables import PendingSnapshot
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.schedule import StateCopies


class SnapshotPool:
    """Places 0 to num_places - 1. A place is blank, or taken, or has a snapshot that is found by
    the hash of its prefix. Of these the least recently used one gives way."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._blank = list(range(num_places - 1, -1, -1))  # the last is taken first
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # the first gives way first

    @property
    def num_used(self) -> int:
        return self.num_places - len(self._blank)

    def __contains__(self, content: bytes) -> bool:
        return content in self._place_of

    def use(self, content: bytes) -> int:
        """The place of a snapshot, which becomes the most recently used one."""
        self._place_of.move_to_end(content)
        return self._place_of[content]

    def take(self) -> int | None:
        """Take a place for a new snapshot; None: all are taken."""
        if self._blank:
            return self._blank.pop()
        return self._place_of.popitem(last=False)[1] if self._place_of else None

    def name(self, place: int, content: bytes) -> None:
        """Make a taken place findable, or blank if another one has the same snapshot."""
        if content in self._place_of:
            self._blank.append(place)
        else:
            self._place_of[content] = place

    def give_back(self, place: int) -> None:
        """Make a taken place blank."""
        self._blank.append(place)

    def demote(self, content: bytes) -> None:
        """Let this snapshot, if there is one, give way before all others."""
        if content in self._place_of:
            self._place_of.move_to_end(content, last=False)

    def forget(self, content: bytes) -> None:
        """Make a snapshot unfindable, because it is not what its hash says."""
        place = self._place_of.pop(content, None)
        if place is not None:
            self._blank.append(place)

    def reset(self) -> None:
        """Forget all snapshots."""
        self._blank += self._place_of.values()
        self._place_of.clear()

    def check(self, taken: Sequence[int]) -> None:
        """Assert that every place is in one state, given those that are taken."""
        places = sorted([*self._blank, *self._place_of.values(), *taken])
        assert places == list(range(self.num_places)), f"places of snapshots: {places}"


class Snapshots:
    """Which prefixes have snapshots, and what each step copies."""

    def __init__(self, sizes: StateSnapshots, block_size: int) -> None:
        assert sizes.stride % block_size == 0, f"{sizes} with blocks of {block_size}"
        self.sizes = sizes
        self._block_size = block_size
        self._pool = SnapshotPool(sizes.count)
        self._loads: list[tuple[int, Request]] = []  # for the step that is being planned

    @property
    def num_used(self) -> int:
        return self._pool.num_used

    def find(self, request: Request, num_blocks: int) -> int:
        """The length in blocks of the longest prefix with a snapshot, at most `num_blocks`, of
        which all hashes are known."""
        hashes = request.block_hashes
        while num_blocks and hashes[num_blocks - 1] not in self._pool:
            num_blocks -= 1
        return num_blocks

    def load(self, request: Request, num_blocks: int) -> None:
        """Let an admitted request go on from a snapshot in the next step."""
        self._loads.append((self._pool.use(request.block_hashes[num_blocks - 1]), request))

    def cut(self, request: Request, start: int, num_tokens: int) -> int:
        """How many of a row's tokens from `start` on to compute, so that it ends where a snapshot
        is wanted."""
        if request.hash_root is None:
            return num_tokens
        end = start + num_tokens
        for stop in self._stops(request):
            if start < stop < end:
                return stop - start
        border = end - end % self.sizes.stride
        return border - start if border > start else num_tokens

    def most_drafts(self, request: Request) -> int:
        """How many drafts the next row may have, so that some row ends at the stride's next border.

        Where rows with drafts end is known late. So they end before the border even if all drafts
        are right, with a token between for the row that is planned meanwhile.
        """
        start = request.num_computed_tokens
        known = request.num_certain_tokens
        border = known - known % self.sizes.stride + self.sizes.stride
        return border - 2 - (start + 1)

    def take_copies(self, rows: Iterable[Request]) -> StateCopies | None:
        """What the step of these rows copies; None: nothing. Its admissions have been noted."""
        stride = self.sizes.stride
        stores: list[tuple[int, int]] = []
        for request in rows:
            if request.num_uncertain:
                continue  # nobody knows where the row ends
            end = request.num_computed_tokens
            is_passed = end % stride == 0
            if (is_passed or end in self._stops(request)) and request.hash_root is not None:
                num_blocks = end // self._block_size
                is_passed &= end not in self._stops(request)
                place = self._place_for(request, num_blocks)
                if place is not None:
                    request.snapshots.append(PendingSnapshot(num_blocks, place, is_passed))
                    stores.append((request.slot, place))
        loads = [(place, request.slot) for place, request in self._loads]
        self._loads = []
        return StateCopies.of(loads, stores) if loads or stores else None

    def register(self, request: Request) -> None:
        """Name the request's snapshots of prefixes whose blocks are registered."""
        hashes, num_blocks = request.block_hashes, request.num_registered_blocks
        while request.snapshots and request.snapshots[0].num_blocks <= num_blocks:
            its = request.snapshots.pop(0)
            content = hashes[its.num_blocks - 1]
            self._pool.name(its.place, content)
            request.passed_snapshot = content if its.is_passed else None

    def drop(self, request: Request) -> None:
        """Give back the places that still wait for a request's tokens."""
        for its in request.snapshots:
            self._pool.give_back(its.place)
        request.snapshots = []
        request.passed_snapshot = None

    def forget(self, content: bytes) -> None:
        self._pool.forget(content)

    def reset(self) -> None:
        self._pool.reset()

    def check(self, running: Iterable[Request]) -> None:
        """Assert that places add up."""
        self._pool.check([its.place for request in running for its in request.snapshots])

    def _stops(self, request: Request) -> tuple[int, int]:
        """Where a request's prefix parts from other requests': from those before it, and from
        those that wait for its prompt."""
        size = self._block_size
        shared = (request.num_prompt_tokens - 1) // size * size if request.followers else 0
        return request.parts_at, shared

    def _place_for(self, request: Request, num_blocks: int) -> int | None:
        """A place for a new snapshot; None: there is one of this prefix, or no place."""
        hashes = request.block_hashes
        if len(hashes) >= num_blocks and hashes[num_blocks - 1] in self._pool:
            self._pool.use(hashes[num_blocks - 1])
            return None
        # A long prompt leaves one behind every chunk. Only the last is likely to be used, so the
        # one before gives way rather than other requests' snapshots.
        if request.passed_snapshot is not None:
            self._pool.demote(request.passed_snapshot)
        return self._pool.take()
