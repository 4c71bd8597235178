"""Finds adapters that requests name and that nobody has loaded: folders of allowed directories.

A name comes from a client, so it must not lead out of these directories: it is the name of a folder
and no path, and a link must end below one of them.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from jaxllm.errors import refused
from jaxllm.lora.request import LoRARequest

# What every adapter has; a folder without it is none.
_CONFIG = "adapter_config.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class AdapterResolver:
    """Looks names up in directories, of which the first that has a name wins. It keeps nothing: a
    folder that appears is found by the next request, and one that is gone is not."""

    def __init__(self, directories: Sequence[str] = ()):
        for one in directories:
            path = Path(one).expanduser()
            if not one or not path.is_dir() or not os.access(path, os.R_OK | os.X_OK):
                raise refused("lora_resolver_dirs", one, "there is no such directory to read")
        self._directories = [Path(one).expanduser().resolve() for one in directories]

    def resolve(self, name: str) -> LoRARequest | None:
        """The adapter of this name, not yet checked; None: there is none."""
        if _NAME.fullmatch(name) is None:
            return None
        for directory in self._directories:
            path = Path(os.path.realpath(directory / name))
            is_inside = any(path.is_relative_to(one) for one in self._directories)
            if is_inside and has_adapter(path):
                return LoRARequest(name, number_of(name), str(path))
        return None


def has_adapter(path: str | os.PathLike[str]) -> bool:
    return os.path.isfile(os.path.join(path, _CONFIG))


def number_of(name: str) -> int:
    """A number that all processes of a server give the name, far above those of --lora-modules."""
    digest = hashlib.sha256(name.encode()).digest()
    return (1 << 62) + (int.from_bytes(digest[:8], "little") >> 2)
