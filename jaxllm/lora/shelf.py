"""The adapters in a host's memory, arranged as the slots of its devices have them.

The engine says which adapters are wanted, and hears later whether they could be read. Over several
hosts each rank has a shelf, and reads the same path.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from jaxllm.errors import CheckpointError, JaxLLMError
from jaxllm.lora.adapter_file import Matrices, content_of, read_adapter
from jaxllm.lora.request import Adapter, AdapterLimits


class Fetched(NamedTuple):
    """An adapter that has been read, or the reason why it could not be."""

    content: str
    error: str | None


class Shelf(Protocol):
    """What an engine asks of its executor."""

    def fetch(self, adapter: Adapter) -> None:
        """Begin to read an adapter, and return at once."""
        ...

    def fetched(self, *, wait: bool) -> Iterable[Fetched]:
        """What has been read since the last call; with `wait`, which says that something is being
        read, one at least."""
        ...

    def forget(self, content: str) -> None:
        """Free the memory of an adapter, which is not being read."""
        ...


class HostShelf:
    """The adapters in this process. Another thread reads them, one after the other."""

    def __init__(
        self, limits: AdapterLimits, lay_out: Callable[[Mapping[str, Matrices]], Any]
    ) -> None:
        """`lay_out` arranges the matrices of an adapter for the devices; the thread calls it."""
        self._limits = limits
        self._lay_out = lay_out
        self._arrays: dict[str, Any] = {}  # by content
        self._fetched: SimpleQueue[Fetched] = SimpleQueue()
        self._tell: Callable[[Fetched], None] = self._fetched.put
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    def follow(self, tell: Callable[[Fetched], None]) -> None:
        """Tell somebody else what has been read, from the thread, in place of `fetched`."""
        self._tell = tell

    def fetch(self, adapter: Adapter) -> None:
        self._thread.submit(self._read, adapter)

    def fetched(self, *, wait: bool) -> Iterable[Fetched]:
        found = [self._fetched.get()] if wait else []
        while not self._fetched.empty():
            found.append(self._fetched.get())
        return found

    def arrays(self, content: str) -> Any:
        """An adapter that has been read, as `lay_out` has arranged it."""
        return self._arrays[content]

    def forget(self, content: str) -> None:
        self._arrays.pop(content, None)  # perhaps it could not be read

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _read(self, adapter: Adapter) -> None:
        error = None
        path = Path(adapter.path)
        try:
            if content_of(path) != adapter.content:
                raise CheckpointError(f"the files of {path} have changed since they were checked")
            self._arrays[adapter.content] = self._lay_out(read_adapter(path, self._limits))
        except JaxLLMError as reason:
            error = str(reason)
        except Exception as reason:
            error = repr(reason)
        self._tell(Fetched(adapter.content, error))
