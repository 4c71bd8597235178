"""The adapters that a frontend has checked: from a LoRARequest to what the engine gets.

An adapter's files are read whole and checked before the first request with it, and again when they
have changed. So whatever is wrong with them is refused at the door, and the engine's own thread
reads what has been found right.
"""

import os
import threading
from pathlib import Path
from typing import NamedTuple

from jaxllm.errors import CheckpointError, ValidationError, refused
from jaxllm.lora.adapter_config import CONFIG
from jaxllm.lora.adapter_file import WEIGHTS, content_of, read_adapter
from jaxllm.lora.request import Adapter, AdapterLimits, LoRARequest


class _Checked(NamedTuple):
    """The content of files that have been checked, and by what to see that they have changed."""

    stamps: tuple[tuple[int, int, int], ...]
    content: str


class AdapterCatalog:
    """Checks adapters for one engine. Any thread may use it."""

    def __init__(self, limits: AdapterLimits | None):
        self._limits = limits
        self._checked: dict[str, _Checked] = {}  # by path
        self._lock = threading.Lock()  # of the thread that reads; others find what it has read

    def check(self, request: LoRARequest) -> Adapter:
        """What the engine gets; raise ValidationError if it cannot have the adapter."""
        if not isinstance(request, LoRARequest):
            raise refused("lora_request", request, "it must be a LoRARequest")
        if self._limits is None:
            raise refused(
                "lora_request",
                request.lora_name,
                "the engine has no adapters; start it with enable_lora=True",
            )
        path = os.path.abspath(os.path.expanduser(request.lora_path))
        return Adapter(
            request.lora_name, request.lora_int_id, path, self._content(path, self._limits)
        )

    def _content(self, path: str, limits: AdapterLimits) -> str:
        directory = Path(path)
        if not directory.is_dir():
            raise refused(
                "lora_path", path, f"there is no such directory; PEFT writes one with {CONFIG}"
            )
        if (known := self._known(path)) is not None:
            return known
        with self._lock:
            if (known := self._known(path)) is not None:
                return known
            try:
                # Before the files are read: if they change meanwhile, they are read again.
                stamps, content = _stamps(directory), content_of(directory)
                read_adapter(directory, limits)
            except CheckpointError as error:
                raise ValidationError(str(error), parameter="lora_request") from error
            self._checked[path] = _Checked(stamps, content)
            return content

    def _known(self, path: str) -> str | None:
        """The content of files that have been checked and not changed."""
        known = self._checked.get(path)
        is_same = known is not None and known.stamps == _stamps(Path(path))
        return known.content if known is not None and is_same else None


def _stamps(directory: Path) -> tuple[tuple[int, int, int], ...]:
    """Inode, size and time of change of an adapter's files; nothing of one that is missing."""
    found = []
    for name in (CONFIG, WEIGHTS):
        try:
            status = (directory / name).stat()
        except OSError:
            continue
        found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)
