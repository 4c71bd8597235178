"""The adapters that requests may name as their model, beside the model itself."""

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from jaxllm.errors import ValidationError, refused
from jaxllm.files import parse_json
from jaxllm.lora.request import LoRARequest
from jaxllm.openai.adapter_resolver import AdapterResolver
from jaxllm.openai.users_resolver import UsersResolver

_FIELDS = {"name", "path", "base_model_name"}


class ServedAdapters:
    """Adapters by their names. The names of a server change while it runs."""

    def __init__(
        self,
        adapters: Iterable[LoRARequest] = (),
        resolver: AdapterResolver | None = None,
        users: UsersResolver | None = None,
    ):
        self._resolver = resolver or AdapterResolver()
        self._users = users
        self._by_name = {one.lora_name: one for one in adapters}
        self._numbers = itertools.count(1 + max((a.lora_int_id for a in self), default=0))

    def __iter__(self) -> Iterator[LoRARequest]:
        return iter(self._by_name.values())

    def get(self, name: str) -> LoRARequest | None:
        return self._by_name.get(name)

    def find(self, name: str) -> LoRARequest | None:
        """The adapter of this name, also if it is only in a directory of --lora-resolver-dirs, or
        the user's resolver has found it."""
        found = self.get(name) or self._resolver.resolve(name)
        return found or (None if self._users is None else self._users.found(name))

    async def ask(self, name: str, timeout: float | None = None) -> bool:
        """Let the user's resolver look for a name that is not known; whether it is now."""
        return self._users is not None and await self._users.ask(name, timeout)

    @property
    def under_way(self) -> tuple[asyncio.Task[Any], ...]:
        """What the user's resolver is asked now."""
        return () if self._users is None else self._users.under_way

    def make(self, name: str, path: str) -> LoRARequest:
        """An adapter with a number of its own; it is not served yet."""
        known = self._by_name.get(name)
        number = next(self._numbers) if known is None else known.lora_int_id
        return LoRARequest(name, number, path)

    def add(self, adapter: LoRARequest) -> None:
        self._by_name[adapter.lora_name] = adapter

    def remove(self, name: str) -> LoRARequest | None:
        """Forget an adapter that was given, or that the user's resolver has found."""
        given = self._by_name.pop(name, None)
        return given or (None if self._users is None else self._users.forget(name))


def read_lora_modules(modules: Iterable[str]) -> list[LoRARequest]:
    """The adapters that --lora-modules names: name=path, or a JSON object."""
    adapters: dict[str, LoRARequest] = {}
    for number, text in enumerate(modules, 1):
        adapter = _read_module(text, number)
        if adapter.lora_name in adapters:
            raise refused("lora_modules", text, "two adapters have this name")
        adapters[adapter.lora_name] = adapter
    return list(adapters.values())


def _read_module(text: str, number: int) -> LoRARequest:
    if not text.lstrip().startswith("{"):
        name, is_there, path = text.partition("=")
        if not (name and is_there and path):
            raise refused("lora_modules", text, "write name=path, or a JSON object")
        return LoRARequest(name, number, path)
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise refused("lora_modules", text, f"it is not JSON: {error}") from None
    if not fields.keys() <= _FIELDS or not {"name", "path"} <= fields.keys():
        raise refused("lora_modules", text, "an object has name and path, and base_model_name")
    try:
        return LoRARequest(fields["name"], number, fields["path"], fields.get("base_model_name"))
    except ValidationError as error:
        raise refused("lora_modules", text, str(error)) from error
