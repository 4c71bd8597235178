"""Requests whose prompts another engine has computed: they wait until its blocks are on the host.

From there they come to the devices as every prefix does that was found there. Blocks that do not
come are computed: the other engine may be gone, or may have forgotten them.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.handover.source import BlockSource
from jaxllm.scheduler.features import Drafted, Nothing
from jaxllm.scheduler.kv.manager import KVCacheManager
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.schedule import Schedule, StepResult


class _Held(NamedTuple):
    """A request, and the blocks that it waits for: by cache group, their contents."""

    request: Request
    source: BlockSource
    to_ask: deque[tuple[int, bytes]]
    coming: set[tuple[int, bytes]]


class TakingOver:
    """A `Feature` of an engine that takes blocks of others."""

    name = "handover"

    def __init__(self, kv: KVCacheManager) -> None:
        assert kv.tier is not None, "blocks come to the host first"
        self._kv, self._tier = kv, kv.tier
        self._held: dict[str, _Held] = {}

    def add(self, request: Request) -> None:
        if request.source is None or not self._kv.may_read(request):
            return
        wanted = self._kv.missing_of_prompt(request)
        if wanted:
            held = _Held(request, request.source, deque(wanted), set())
            self._held[request.request_id] = held
            request.num_holds += 1

    def ready(self, *, wait: bool) -> Iterable[Request]:
        if not self._held:
            return ()
        ready = [held.request for held in self._held.values() if not self._goes_on(held)]
        for request in ready:
            del self._held[request.request_id]
        return ready

    def _goes_on(self, held: _Held) -> bool:
        """Ask for what there is room for. Return whether there is something to wait for."""
        tier = self._tier
        for one in [one for one in held.coming if not tier.is_coming(*one)]:
            held.coming.remove(one)
            if not tier.is_there(*one):
                held.to_ask.clear()  # what follows the missing block is of no use
        while held.to_ask and tier.ask(*held.to_ask[0], held.source):
            one = held.to_ask.popleft()
            if tier.is_coming(*one):
                held.coming.add(one)
        return bool(held.coming or held.to_ask)

    def drop(self, request: Request) -> None:
        self._held.pop(request.request_id, None)

    def start_over(self, request: Request) -> None:
        pass

    def lose(self) -> None:
        pass

    def limit(self, request: Request, n: int, budget: int) -> int:
        return n

    def draft(self, rows: Sequence[Request], num_tokens: np.ndarray) -> Drafted | None:
        return None

    def read(
        self, schedule: Schedule, result: StepResult, rows: Sequence[Request | None]
    ) -> Nothing:
        return Nothing()
