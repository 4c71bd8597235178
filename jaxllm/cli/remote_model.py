"""A model behind any OpenAI-compatible server."""

import argparse
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from jaxllm.cli.api_key import with_api_key
from jaxllm.cli.arguments import sampling_fields_from
from jaxllm.cli.conversation import Message, note
from jaxllm.cli.http_client import HTTPClient
from jaxllm.errors import JaxLLMError, UnauthorizedError

Body = TypeVar("Body")

# Parameters with another name in requests.
_NAMES_IN_REQUESTS = {"extra_args": "vllm_xargs"}


class RemoteModel:
    """Requests every answer from the server. Closing the connection aborts the request there."""

    def __init__(self, client: HTTPClient, name: str | None, fields: dict[str, Any]):
        self._client = client
        self._fields = fields
        self.name = name or self._first_model()

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "RemoteModel":
        given = sampling_fields_from(args)
        if "seed" in args:
            given["seed"] = args.seed
        fields = {_NAMES_IN_REQUESTS.get(name, name): value for name, value in given.items()}

        def connect(key: str | None) -> "RemoteModel":
            model = cls(HTTPClient(args.url, key), args.model_name, fields)
            if args.model_name is not None and key is None:
                model.check_key()
            return model

        return with_api_key(args.api_key, args.api_key_file, connect)

    def check_key(self) -> None:
        """Raise now if the server needs a key, and not after the first line."""
        try:
            self._client.get("models")
        except UnauthorizedError:
            raise
        except JaxLLMError:
            pass  # a server need not list its models

    def fits(self, messages: Sequence[Message]) -> bool:
        """Return True. Only the server knows, and it refuses messages that do not fit."""
        return True

    def answer(self, messages: Sequence[Message], stop: threading.Event) -> Iterator[str]:
        is_reasoning = False
        for choice in self._choices("chat/completions", {"messages": list(messages)}, stop):
            reasoning = choice.delta.reasoning or choice.delta.reasoning_content
            if reasoning:
                is_reasoning = True
                note(reasoning, end="")
            if choice.delta.content:
                if is_reasoning:
                    note("\n")
                    is_reasoning = False
                yield choice.delta.content

    def complete(self, prompt: str, stop: threading.Event) -> Iterator[str]:
        """Stream the continuation of a prompt."""
        for choice in self._choices("completions", {"prompt": prompt}, stop):
            if choice.text:
                yield choice.text

    def _choices(
        self, path: str, body: dict[str, Any], stop: threading.Event
    ) -> "Iterator[_Choice]":
        body = {"model": self.name, "stream": True, **body, **self._fields}
        for data in self._client.stream(path, body, stop):
            chunk = self._decode(data, _Chunk)
            if chunk.error is not None:
                raise JaxLLMError(f"the answer ended in an error: {chunk.error}")
            for choice in chunk.choices:
                yield choice
                if choice.finish_reason == "length":
                    note("\nThe answer has reached its longest length.")

    def _first_model(self) -> str:
        models = self._decode(self._client.get("models"), _Models).data
        if not models:
            raise JaxLLMError(f"{self._client.url}: it serves no model; give --model-name")
        return models[0].id

    def _decode(self, data: bytes, kind: type[Body]) -> Body:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise JaxLLMError(
                f"{self._client.url}: this is not OpenAI's protocol: {error}"
            ) from error


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the name on some servers


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    text: str = ""
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]
