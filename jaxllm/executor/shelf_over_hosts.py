"""The adapters of a replica that is on several hosts: one is there when every rank has read it."""

from collections.abc import Callable, Iterable
from typing import Protocol

from jaxllm.executor.wire import AdapterFetched, FetchAdapter, ForgetAdapter, FromLeader
from jaxllm.lora.request import Adapter
from jaxllm.lora.shelf import Fetched, HostShelf

# How long rank 0 waits for the others before it looks at its own shelf again.
_MOMENT_S = 0.05


class Reports(Protocol):
    """What the other ranks say."""

    def take_fetched(self, replica: int, wait_s: float) -> list[AdapterFetched]: ...


class ShelfOverHosts:
    """The shelves of a replica's ranks, seen from rank 0."""

    def __init__(
        self,
        tell: Callable[[FromLeader], None],
        reports: Reports,
        replica: int,
        num_others: int,
        own: HostShelf | None,
    ):
        """`tell` sends a message to the ranks beside rank 0, of which there are so many. Rank 0's
        own shelf is None if it has no device of the replica."""
        self._tell = tell
        self._reports = reports
        self._replica = replica
        self._num_others = num_others
        self._own = own
        self._missing: dict[str, int] = {}  # how many ranks have not read an adapter yet
        self._errors: dict[str, str] = {}  # the first one of each

    def fetch(self, adapter: Adapter) -> None:
        self._missing[adapter.content] = self._num_others + (self._own is not None)
        self._tell(FetchAdapter(self._replica, adapter))
        if self._own is not None:
            self._own.fetch(adapter)

    def fetched(self, *, wait: bool) -> Iterable[Fetched]:
        found = self._whole(wait_s=0.0)
        while wait and not found:
            found = self._whole(wait_s=_MOMENT_S)
        return found

    def _whole(self, *, wait_s: float) -> list[Fetched]:
        """Take in what ranks say; return the adapters of which all have spoken."""
        own = () if self._own is None else self._own.fetched(wait=False)
        answers = [(0, fetched) for fetched in own]
        reports = self._reports.take_fetched(self._replica, 0.0 if answers else wait_s)
        answers += [(report.rank, report.fetched) for report in reports]
        found: list[Fetched] = []
        for rank, (content, error) in answers:
            if error is not None:
                self._errors.setdefault(content, f"rank {rank}: {error}")
            self._missing[content] -= 1
            if not self._missing[content]:
                del self._missing[content]
                found.append(Fetched(content, self._errors.pop(content, None)))
        return found

    def forget(self, content: str) -> None:
        self._tell(ForgetAdapter(self._replica, content))
        if self._own is not None:
            self._own.forget(content)
