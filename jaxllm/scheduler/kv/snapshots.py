"""Snapshots: copies of the states of recurrent layers, from which other requests go on.

Blocks have a prefix's keys and values, and a snapshot has its state: a prefix is found where there
are both. The device has a place for each snapshot. A step copies states into places after its rows
have run, and places into the slots of admitted requests before. So a place may pass on as soon as
another snapshot needs it, even to a step that still reads the old one: it reads first.

A row ends where a snapshot is wanted: at the last multiple of the stride that it reaches, and where
its prompt parts from those that others have computed. So a prefix that several requests share has
one at its very end from its second use on. If a prompt itself ends at a multiple of the stride, a
row ends at the one before, too: the same prompt goes on from there, since its last token is
computed again.

With a tier (`host_tier`), a snapshot that gives way goes to the host, and comes back to a place of
the device when a request needs it. One that its own request has passed does not: a later one of the
same request is of more use. With files, what a restart should find goes there at once: a request's
last snapshot, that of its prompt, and those where prompts part.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

from jaxllm.cache_groups import StateSnapshots
from jaxllm.scheduler.kv.host_tier import HostTier
from jaxllm.scheduler.kv.tables import PendingSnapshot
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.schedule import StateCopies


class SnapshotPool:
    """Places 0 to num_places - 1. A place is blank, or taken, or has a snapshot that is found by
    the hash of its prefix. Of these the least recently used one gives way."""

    def __init__(
        self, num_places: int, evicted: Callable[[int, bytes], None] | None = None
    ) -> None:
        """`evicted` is called for a place that is about to be overwritten, with its content, unless
        that was demoted."""
        self.num_places = num_places
        self._evicted = evicted
        self._blank = list(range(num_places - 1, -1, -1))  # the last is taken first
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # the first gives way first
        self._demoted: set[bytes] = set()

    @property
    def num_used(self) -> int:
        return self.num_places - len(self._blank)

    def __contains__(self, content: bytes) -> bool:
        return content in self._place_of

    def use(self, content: bytes) -> int:
        """The place of a snapshot, which becomes the most recently used one."""
        self._place_of.move_to_end(content)
        self._demoted.discard(content)
        return self._place_of[content]

    def has_room(self, kept: Collection[int]) -> bool:
        """Whether `take` would find a place."""
        return bool(self._blank) or any(its not in kept for its in self._place_of.values())

    def take(self, kept: Collection[int] = ()) -> int | None:
        """Take a place for a new snapshot, none of those that are kept; None: all are taken."""
        if self._blank:
            return self._blank.pop()
        content = next((one for one, at in self._place_of.items() if at not in kept), None)
        if content is None:
            return None
        place = self._place_of.pop(content)
        if content in self._demoted:
            self._demoted.remove(content)
        elif self._evicted is not None:
            self._evicted(place, content)
        return place

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
            self._demoted.add(content)

    def forget(self, content: bytes) -> None:
        """Make a snapshot unfindable, because it is not what its hash says."""
        place = self._place_of.pop(content, None)
        self._demoted.discard(content)
        if place is not None:
            self._blank.append(place)

    def reset(self) -> None:
        """Forget all snapshots."""
        self._blank += self._place_of.values()
        self._place_of.clear()
        self._demoted.clear()

    def check(self, taken: Sequence[int]) -> None:
        """Assert that every place is in one state, given those that are taken."""
        places = sorted([*self._blank, *self._place_of.values(), *taken])
        assert places == list(range(self.num_places)), f"places of snapshots: {places}"
        assert self._demoted <= self._place_of.keys()


class Snapshots:
    """Which prefixes have snapshots, and what each step copies."""

    def __init__(
        self, sizes: StateSnapshots, block_size: int, tier: HostTier | None = None, group: int = 0
    ) -> None:
        """`group` is that of the snapshots in the tier."""
        assert sizes.stride % block_size == 0, f"{sizes} with blocks of {block_size}"
        self.sizes = sizes
        self._block_size = block_size
        self._tier, self._group = tier, group
        self._pool = SnapshotPool(sizes.count, None if tier is None else self._offer)
        self._loads: list[tuple[int, Request]] = []  # for the step that is being planned

    @property
    def num_used(self) -> int:
        return self._pool.num_used

    def find(self, request: Request, num_blocks: int, *, now: bool = True) -> int:
        """The length in blocks of the longest prefix with a snapshot, at most `num_blocks`, of
        which all hashes are known. Without `now`, what is on its way to the host counts, and what
        would first be read from files."""
        hashes = request.block_hashes
        while num_blocks and not self._has(hashes[num_blocks - 1], now):
            num_blocks -= 1
        return num_blocks

    def missing(self, request: Request, num_blocks: int) -> list[bytes]:
        """The contents that the device lacks to go on from a prefix: one, or none."""
        content = request.block_hashes[num_blocks - 1] if num_blocks else None
        return [] if content is None or content in self._pool else [content]

    def has_room(self, request: Request, num_blocks: int) -> bool:
        """Whether the device has the snapshot of a prefix, or a place for it."""
        return not self.missing(request, num_blocks) or self._pool.has_room(self._loading())

    def load(self, request: Request, num_blocks: int) -> None:
        """Let an admitted request go on from a snapshot in the next step."""
        content = request.block_hashes[num_blocks - 1]
        if content not in self._pool:
            assert self._tier is not None, f"{request}: there is no snapshot"
            # Before a place is taken: what it held may drive the content out.
            its = self._tier.place_of(self._group, content)
            # What comes from the host is written before the step, which then reads the places of
            # all its loads. So none of these passes on to it.
            place = self._pool.take(self._loading())
            assert place is not None, "no place for the snapshot"
            self._tier.load(self._group, its, place)
            self._pool.name(place, content)
        self._loads.append((self._pool.use(content), request))

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
            if self._tier is not None:
                self._demote_passed(request)
                if self._tier.is_eager and (
                    not its.is_passed or self._is_last_of_prompt(request, its.num_blocks)
                ):
                    self._offer(self._pool.use(content), content)
            request.passed_snapshot = content if its.is_passed else None

    def drop(self, request: Request) -> None:
        """Give back the places that still wait for a request's tokens."""
        for its in request.snapshots:
            self._pool.give_back(its.place)
        content = request.passed_snapshot
        if self._tier is not None and self._tier.is_eager and content is not None:
            if content in self._pool:
                self._offer(self._pool.use(content), content)
        request.snapshots = []
        request.passed_snapshot = None

    def forget(self, content: bytes) -> None:
        self._pool.forget(content)
        if self._tier is not None:
            self._tier.forget(self._group, content)

    def reset(self) -> None:
        self._pool.reset()

    def check(self, running: Iterable[Request]) -> None:
        """Assert that places add up."""
        self._pool.check([its.place for request in running for its in request.snapshots])

    def _stops(self, request: Request) -> tuple[int, int, int]:
        """Where a request's prefix parts from other requests': from those before it, from those
        that wait for its prompt, and from the same prompt, if it ends at a multiple of the stride.
        """
        size, stride, length = self._block_size, self.sizes.stride, request.num_prompt_tokens
        shared = (length - 1) // size * size if request.followers else 0
        return request.parts_at, shared, 0 if length % stride else length - stride

    def _is_last_of_prompt(self, request: Request, num_blocks: int) -> bool:
        """Whether a prefix ends at the last multiple of the stride from which the same prompt may
        go on: its last token is computed again."""
        end = num_blocks * self._block_size
        return end < request.num_prompt_tokens <= end + self.sizes.stride

    def _place_for(self, request: Request, num_blocks: int) -> int | None:
        """A place for a new snapshot; None: there is one of this prefix, or no place."""
        hashes = request.block_hashes
        if len(hashes) >= num_blocks and hashes[num_blocks - 1] in self._pool:
            self._pool.use(hashes[num_blocks - 1])
            return None
        # A long prompt leaves one behind every chunk. Only the last is likely to be used, so the
        # one before gives way rather than other requests' snapshots. With a tier these are not
        # lost, so it stays until the new one can be found, in case its request is preempted before.
        if self._tier is None:
            self._demote_passed(request)
        return self._pool.take()

    def _demote_passed(self, request: Request) -> None:
        if request.passed_snapshot is not None:
            self._pool.demote(request.passed_snapshot)

    def _has(self, content: bytes, now: bool) -> bool:
        if content in self._pool:
            return True
        if (tier := self._tier) is None:
            return False
        return tier.is_there(self._group, content) if now else tier.has(self._group, content)

    def _loading(self) -> set[int]:
        """The places that the step that is being planned reads."""
        return {place for place, _ in self._loads}

    def _offer(self, place: int, content: bytes) -> None:
        assert self._tier is not None
        self._tier.offer(self._group, place, content)
