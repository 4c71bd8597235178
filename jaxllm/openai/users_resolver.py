"""Asks a resolver of the user's for adapters that requests name and that the server does not know.

It is asked once for each name that it knows, however many requests wait for the answer. What it has
found counts for as long as the files are there.
"""

import asyncio
import dataclasses
import importlib
import inspect
import os
from functools import partial
from typing import Any

from jaxllm.errors import refused
from jaxllm.logging import init_logger
from jaxllm.lora.request import LoRARequest
from jaxllm.lora.resolver import LoRAResolver
from jaxllm.openai.adapter_resolver import has_adapter, number_of
from jaxllm.openai.errors import UnavailableError

logger = init_logger(__name__)

_MAX_NAME_CHARS = 512
_LONGEST_S = 600.0


class UsersResolver:
    """A resolver, and what it has found for a model."""

    def __init__(self, resolver: LoRAResolver, model: str):
        self._resolver, self._model = resolver, model
        self._found: dict[str, LoRARequest] = {}
        self._asking: dict[str, asyncio.Task[LoRARequest | None]] = {}

    @classmethod
    def load(cls, spec: str, model: str) -> "UsersResolver":
        """Make the resolver that 'module:Class' or 'module:object' names."""
        module, _, name = spec.partition(":")
        if not module or not name:
            raise refused("lora_resolver", spec, "write it as 'module:Class'")
        try:
            found: Any = getattr(importlib.import_module(module), name)
            resolver = found() if isinstance(found, type) else found
        except Exception as error:  # a user's code may raise anything
            kind = type(error).__name__
            raise refused("lora_resolver", spec, f"it cannot be made ({kind}: {error})") from error
        if not inspect.iscoroutinefunction(getattr(resolver, "resolve_lora", None)):
            raise refused(
                "lora_resolver", spec, "it needs an async resolve_lora(base_model_name, lora_name)"
            )
        return cls(resolver, model)

    @property
    def under_way(self) -> tuple[asyncio.Task[Any], ...]:
        return tuple(self._asking.values())

    def found(self, name: str) -> LoRARequest | None:
        """The adapter, if the resolver has found it and its files are there."""
        adapter = self._found.get(name)
        if adapter is None or has_adapter(adapter.lora_path):
            return adapter
        self._found.pop(name, None)
        return None

    def forget(self, name: str) -> LoRARequest | None:
        """Let the resolver be asked for a name again; return what it had found."""
        return self._found.pop(name, None)

    async def ask(self, name: str, timeout: float | None = None) -> bool:
        """Whether there is an adapter of this name; if so, `found` has it. Raise UnavailableError
        if the resolver does not say."""
        if not name or len(name) > _MAX_NAME_CHARS:
            return False
        task = self._asking.get(name)
        if task is None:
            task = self._asking[name] = asyncio.create_task(self._ask(name))
            task.add_done_callback(partial(self._end, name))
        try:
            # Others may wait for it, so that it goes on without this request.
            adapter = await asyncio.wait_for(asyncio.shield(task), timeout or _LONGEST_S)
        except TimeoutError:
            raise UnavailableError(
                f"model={name!r:.80}: it is still being looked up; try again"
            ) from None
        return adapter is not None

    def _end(self, name: str, task: asyncio.Task[Any]) -> None:
        del self._asking[name]
        if not task.cancelled():
            task.exception()  # perhaps nobody waits for it any more

    async def _ask(self, name: str) -> LoRARequest | None:
        try:
            found = await self._resolver.resolve_lora(self._model, name)
            adapter = None if found is None else self._checked(found, name)
        except Exception as error:  # a user's code may raise anything
            logger.exception("lora_resolver: it failed to look up %.200r", name)
            raise UnavailableError(
                f"model={name!r:.80} could not be looked up; the server's log says why"
            ) from error
        if adapter is not None:
            self._found[name] = adapter
        return adapter

    def _checked(self, found: object, name: str) -> LoRARequest:
        if not isinstance(found, LoRARequest):
            raise TypeError(f"resolve_lora returned {found!r:.200}, and no LoRARequest")
        if found.lora_name != name:
            raise ValueError(f"resolve_lora returned the adapter {found.lora_name!r:.200}")
        path = os.path.abspath(os.path.expanduser(found.lora_path))
        if not has_adapter(path):
            raise FileNotFoundError(f"there is no adapter_config.json in {path}")
        # All frontends give the name this number; the user's may be that of another adapter.
        return dataclasses.replace(found, lora_int_id=number_of(name), lora_path=path)
