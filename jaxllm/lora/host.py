"""Adapters in the engine: which are in the host's memory, which are in slots of the device, and
which requests wait for them.

An adapter that a request needs and the host does not have is fetched; the request waits, parked. A
request whose adapter has no slot, while running requests use all of them, is set aside: others
overtake it. They need an adapter that has a slot, or none. Those with an adapter can keep the slots
busy for ever, so only so many of them overtake; then they wait too, until the oldest has its slot.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxllm.lora.request import Adapter
from jaxllm.lora.shelf import Shelf
from jaxllm.scheduler.features import Brought, Drafted, Nothing
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.schedule import NO_ADAPTER, AdapterWrite, Schedule, StepResult

# How many requests with adapters may overtake one that waits for a slot.
MAX_OVERTAKING = 64


@dataclass(eq=False)
class _Held:
    """An adapter that requests use, or that the host keeps for later ones."""

    adapter: Adapter
    is_there: bool = False  # on the shelf
    is_being_read: bool = False
    is_pinned: bool = False
    is_removed: bool = False  # as soon as it has been read, unless a request needs it by then
    num_requests: int = 0  # unfinished
    num_running: int = 0
    slot: int = NO_ADAPTER  # on the device
    waiting: list[Request] = field(default_factory=list)  # until it is read
    # Until it has a slot: a heap by order.
    aside: list[tuple[tuple, Request]] = field(default_factory=list)


class Adapters:
    """The feature's host half, and the scheduler's gate for requests with adapters."""

    name = "lora"

    def __init__(self, shelf: Shelf, *, num_slots: int, num_kept: int) -> None:
        """The devices have so many slots, and the shelf is to keep so many adapters."""
        self._shelf = shelf
        self._num_kept = num_kept
        self._held: OrderedDict[str, _Held] = OrderedDict()  # by content, the last used last
        self._slots: list[_Held | None] = [None] * num_slots
        self._idle_slots: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))
        self._num_reading = 0
        # Heap of the adapters with requests aside: the order of the first one, a number, the
        # adapter. Entries of requests that are no longer the first are passed over.
        self._oldest: list[tuple[tuple, int, _Held]] = []
        self._numbers = itertools.count()
        self._overtaken: tuple | None = None  # the order of the first request aside
        self._num_overtaking = 0  # requests with adapters that have overtaken it
        self._may_release = False
        self._writes: list[AdapterWrite] = []

    # ---- what commands ask

    def keep(self, adapter: Adapter) -> None:
        """Read an adapter before a request needs it."""
        self._hold(adapter)
        self._drop_unused()

    def pin(self, number: int) -> bool:
        """Never drop the adapters of this number. Return whether there are any."""
        found = [
            one
            for one in self._held.values()
            if one.adapter.number == number and not one.is_removed
        ]
        for held in found:
            held.is_pinned = True
        return bool(found)

    def remove(self, number: int) -> bool:
        """Forget the adapters of this number, unless requests use them. Return whether there were
        any."""
        found = [one for one in self._held.values() if one.adapter.number == number]
        is_known = number in self.numbers()
        for held in found:
            held.is_pinned = False
            if not held.num_requests:
                self._forget(held)
        return is_known

    def numbers(self) -> set[int]:
        """The numbers of all adapters that the host has or reads."""
        return {held.adapter.number for held in self._held.values() if not held.is_removed}

    def names(self) -> tuple[list[str], list[str]]:
        """The names of the adapters of running and of waiting requests."""
        used = [held for held in self._held.values() if held.num_requests]
        running = sorted({one.adapter.name for one in used if one.num_running})
        waiting = sorted({one.adapter.name for one in used if one.num_requests > one.num_running})
        return running, waiting

    # ---- Feature

    def add(self, request: Request) -> None:
        if request.adapter is None:
            return
        held = self._hold(request.adapter)
        held.num_requests += 1
        if not held.is_there:
            request.num_holds += 1
            held.waiting.append(request)

    def ready(self, *, wait: bool) -> Iterable[Request]:
        ready: list[Request] = []
        if self._num_reading:
            ready += self._read_ones(wait=wait)
        if self._may_release:
            self._may_release = False
            ready += self._release()
        return ready

    def drop(self, request: Request) -> None:
        if request.adapter is None:
            return
        held = self._held[request.adapter.content]
        held.num_requests -= 1
        if not held.num_requests and not held.is_there and not held.is_being_read:
            self._forget(held)  # it could not be read
        self._may_release = bool(self._oldest)
        self._drop_unused()

    def start_over(self, request: Request) -> None:
        pass  # what it needs does not change

    def limit(self, request: Request, n: int, budget: int) -> int:
        return n

    def draft(self, rows: Sequence[Request], num_tokens: np.ndarray) -> Drafted | None:
        if not self._writes:
            return None
        writes, self._writes = self._writes, []
        return Drafted({}, needs_mixed=False, wants_logits=False, adapter_writes=writes)

    def read(
        self, schedule: Schedule, result: StepResult, rows: Sequence[Request | None]
    ) -> Brought:
        return Nothing()

    # ---- Gate

    def admits(self, request: Request) -> bool:
        if request.adapter is None:
            return True
        held = self._held[request.adapter.content]
        has_place = held.slot != NO_ADAPTER or bool(self._idle_slots)
        if has_place and not self._must_wait(request.order):
            return True
        self._set_aside(held, request)
        return False

    def admitted(self, request: Request) -> int:
        if request.adapter is None:
            return NO_ADAPTER
        held = self._held[request.adapter.content]
        self._held.move_to_end(request.adapter.content)
        if held.slot == NO_ADAPTER:
            self._take_slot(held)
        self._idle_slots.pop(held.slot, None)
        held.num_running += 1
        self._note_overtaking(request.order)
        return held.slot

    def left(self, request: Request) -> None:
        if request.adapter is None:
            return
        held = self._held[request.adapter.content]
        held.num_running -= 1
        if not held.num_running:
            self._idle_slots[held.slot] = None
            self._may_release = bool(self._oldest)

    def lose(self) -> None:
        self._writes = []
        for held in filter(None, self._slots):
            held.slot = NO_ADAPTER
        self._slots = [None] * len(self._slots)
        self._idle_slots = OrderedDict.fromkeys(range(len(self._slots)))
        self._may_release = bool(self._oldest)

    # ---- the host's memory

    def _hold(self, adapter: Adapter) -> _Held:
        held = self._held.get(adapter.content)
        if held is None:
            held = self._held[adapter.content] = _Held(adapter)
        held.adapter = adapter  # its newest name and path
        held.is_removed = False
        if not held.is_there and not held.is_being_read:
            held.is_being_read = True
            self._num_reading += 1
            self._shelf.fetch(adapter)
        self._held.move_to_end(adapter.content)
        return held

    def _read_ones(self, *, wait: bool) -> list[Request]:
        """The requests whose adapters have been read, or could not be."""
        wait = wait and any(one.waiting for one in self._held.values())
        ready: list[Request] = []
        for content, error in self._shelf.fetched(wait=wait):
            held = self._held[content]
            held.is_being_read = False
            self._num_reading -= 1
            ready += held.waiting
            if error is None:
                held.is_there = True
            else:
                for request in held.waiting:
                    request.error = f"lora_request: {error}"[:500]
                held.is_pinned = False
            held.waiting = []
            if not held.num_requests and (held.is_removed or not held.is_there):
                self._forget(held)
        return ready

    def _drop_unused(self) -> None:
        """Forget what has not been used for longest, as far as there are too many."""
        too_many = len(self._held) - self._num_kept
        if too_many <= 0:
            return
        unused = (
            one
            for one in self._held.values()
            if not one.num_requests and not one.is_pinned and not one.is_being_read
        )
        for held in [one for one, _ in zip(unused, range(too_many), strict=False)]:
            self._forget(held)

    def _forget(self, held: _Held) -> None:
        """Forget an adapter that no request uses."""
        assert not held.num_requests, held.adapter
        if held.is_being_read:
            held.is_removed = True
            return
        self._shelf.forget(held.adapter.content)
        if held.slot != NO_ADAPTER:
            self._slots[held.slot] = None
        del self._held[held.adapter.content]

    # ---- slots of the device

    def _take_slot(self, held: _Held) -> None:
        """Give an adapter the slot that has been idle for longest."""
        slot, _ = self._idle_slots.popitem(last=False)
        former = self._slots[slot]
        if former is not None:
            former.slot = NO_ADAPTER
        self._slots[slot] = held
        held.slot = slot
        self._writes.append(AdapterWrite(slot, held.adapter.content))

    def _set_aside(self, held: _Held, request: Request) -> None:
        if not held.aside or request.order < held.aside[0][0]:
            self._push(request.order, held)
        heapq.heappush(held.aside, (request.order, request))
        request.num_holds += 1

    def _push(self, order: tuple, held: _Held) -> None:
        heapq.heappush(self._oldest, (order, next(self._numbers), held))

    def _first(self) -> tuple | None:
        """The order of the first request that is aside."""
        while self._oldest:
            order, _, held = self._oldest[0]
            while held.aside and held.aside[0][1].is_finished:
                heapq.heappop(held.aside)
            if held.aside and held.aside[0][0] == order:
                return order
            # The request has ended, or been released; the next one of the adapter follows.
            heapq.heappop(self._oldest)
            if held.aside and held.aside[0][0] > order:
                self._push(held.aside[0][0], held)
        return None

    def _note_overtaking(self, order: tuple) -> None:
        """Count a request that overtakes the first one aside."""
        first = self._first()
        if first != self._overtaken:
            self._overtaken, self._num_overtaking = first, 0
        self._num_overtaking += first is not None and order > first

    def _must_wait(self, order: tuple) -> bool:
        """Whether too many have overtaken a request that is aside and comes before this one."""
        first = self._first()
        is_late = first is not None and first == self._overtaken and order > first
        return is_late and self._num_overtaking >= MAX_OVERTAKING

    def _release(self) -> list[Request]:
        """Let those aside try again: of as many adapters as there are idle slots, the oldest first,
        and of those whose adapter runs, unless they must wait."""
        released: list[Request] = []
        still_aside: list[_Held] = []
        num_slots, may_overtake = len(self._idle_slots), True
        while (order := self._first()) is not None:
            if not still_aside:  # it is the first of all
                may_overtake = order != self._overtaken or self._num_overtaking < MAX_OVERTAKING
            held = heapq.heappop(self._oldest)[2]
            runs = held.num_running > 0
            if (runs and may_overtake) or (not runs and num_slots):
                num_slots -= not runs
                released += [request for _, request in held.aside if not request.is_finished]
                held.aside = []
            else:
                still_aside.append(held)
        for held in still_aside:
            self._push(held.aside[0][0], held)
        return released
