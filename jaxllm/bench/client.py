"""Sends one streamed request of OpenAI's API, reads it to its end and measures it."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from jaxllm.async_http import BrokenConnectionError, HTTPClient
from jaxllm.bench.datasets import BenchRequest
from jaxllm.bench.figures import Outcome
from jaxllm.bench.options import LoadOptions
from jaxllm.errors import JaxLLMError, UnauthorizedError

PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_LONGEST_ERROR = 500


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    """The fields of a chunk that are used; others are skipped."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class OpenAIClient:
    """Sends requests to one server and measures their answers."""

    http: HTTPClient
    path: str
    fields: Mapping[str, Any]  # common to all requests
    is_chat: bool
    timeout_s: float
    _encoder: msgspec.json.Encoder = field(default_factory=msgspec.json.Encoder)

    @classmethod
    def of(cls, http: HTTPClient, options: LoadOptions, model: str) -> "OpenAIClient":
        is_chat = options.backend == "openai-chat"
        fields: dict[str, Any] = {
            "model": model,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            fields["ignore_eos"] = True
        return cls(
            http=http,
            path=options.endpoint or PATHS["openai-chat" if is_chat else "openai"],
            fields=fields | (options.extra_body or {}),
            is_chat=is_chat,
            timeout_s=options.request_timeout,
        )

    async def send(self, request: BenchRequest, run_start: float) -> Outcome:
        """Send a request and return its outcome, which contains any error. Never raises."""
        body = self._encoder.encode(self._body(request))
        outcome = Outcome(request.prompt_len)
        start = time.perf_counter()
        outcome.start = start - run_start
        answer = _Answer(outcome, start)
        try:
            async with asyncio.timeout(self.timeout_s):
                status = await self.http.post(self.path, body, answer.read)
            answer.end(status)
        except TimeoutError:
            outcome.error = f"no complete answer within {self.timeout_s:g} s"
        except (BrokenConnectionError, OSError) as error:
            # Without any text, an error would count as a success.
            outcome.error = str(error) or type(error).__name__
        if outcome.has_failed:
            outcome.latency = time.perf_counter() - start
        return outcome

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        if not self.is_chat:
            own = {"prompt": request.prompt, "max_tokens": request.output_len}
        else:
            messages = [{"role": "user", "content": request.prompt}]
            own = {"messages": messages, "max_completion_tokens": request.output_len}
        return own | dict(self.fields)


class _Answer:
    """Reads the stream of one answer."""

    def __init__(self, outcome: Outcome, start: float):
        self._outcome = outcome
        self._start = start
        self._last = 0.0  # time of the last piece
        self._unread = b""  # an incomplete line
        self._pieces: list[str] = []
        self._usage: _Usage | None = None
        self._has_ended = False  # the stream's end marker has arrived

    def read(self, status: int, data: bytes) -> None:
        """Take a part of the body."""
        if status != 200:
            self._unread += data
            return
        now = time.perf_counter()
        lines = (self._unread + data).split(b"\n")
        self._unread = lines.pop()
        for line in lines:
            # Other lines are empty, comments or fields that are not used. An event of this API is
            # one line of data.
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def end(self, status: int) -> None:
        """Handle the end of the body."""
        outcome = self._outcome
        if status != 200:
            outcome.error = f"status {status}: {_message_of(self._unread)}"
        elif outcome.error:
            return
        elif not self._has_ended:
            outcome.error = "the stream ended in the middle of the answer"
        elif self._usage is None:
            outcome.error = "the server does not say how many tokens the answer has"
        elif not self._last:
            outcome.error = "the answer is empty"
        else:
            outcome.text = "".join(self._pieces)
            outcome.output_len = self._usage.completion_tokens
            outcome.prompt_len = self._usage.prompt_tokens or outcome.prompt_len

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._has_ended = True
            return
        try:
            chunk = _decode_chunk(data)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._outcome.error = f"a chunk is not what it should be: {error}"
            return
        if chunk.error is not None:
            self._outcome.error = f"in the stream: {_message_of(data)}"
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            self._has_ended = self._has_ended or choice.finish_reason is not None
            text = _text_of(choice)
            if text:
                self._pieces.append(text)
            if text or _is_silent_token(choice):
                outcome = self._outcome
                if self._last:
                    outcome.itl.append(now - self._last)
                else:
                    outcome.ttft = now - self._start
                self._last = now
                outcome.latency = now - self._start


def _text_of(choice: _Choice) -> str:
    delta = choice.delta
    if delta is None:
        return choice.text or ""
    text = delta.content or delta.reasoning or delta.reasoning_content
    if text:
        return text
    return msgspec.json.encode(delta.tool_calls).decode() if delta.tool_calls else ""


def _is_silent_token(choice: _Choice) -> bool:
    """Whether a piece without text is a token, such as a part of a character. The first piece,
    which announces an answer, and the last one are not."""
    return choice.finish_reason is None and (choice.delta is None or choice.delta.role is None)


def _message_of(body: bytes) -> str:
    """The message of an error in OpenAI's shape, or the body itself."""
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.MsgspecError, RecursionError, KeyError, TypeError):
        message = body.decode("utf-8", "replace")
    return " ".join(str(message).split())[:_LONGEST_ERROR]


class Served(NamedTuple):
    """A model in its server's list."""

    name: str
    source: str  # the origin that the server reports
    max_model_len: int | None  # None: the server does not report it


async def find_model(http: HTTPClient, name: str | None = None) -> Served:
    """Find the model of this name or, without one, the server's first model. A named model need not
    be in the server's list."""
    body = bytearray()
    try:
        status = await http.get("/v1/models", lambda status, data: body.extend(data))
    except OSError as error:
        raise JaxLLMError(f"no server at {http.base_url}: {error.strerror or error}") from error
    if status == 401:
        raise UnauthorizedError(f"{http.base_url}: {_message_of(bytes(body))}")
    if status != 200 and name is None:
        raise JaxLLMError(f"/v1/models: status {status}: {_message_of(bytes(body))}")
    try:
        listed = msgspec.json.decode(body, type=_Models).data
    except (msgspec.MsgspecError, RecursionError):
        listed = []
    for model in listed:
        if name in (None, model.id):
            return Served(model.id, model.root or model.id, model.max_model_len)
    if name is None:
        raise JaxLLMError("/v1/models names no model; give --model")
    return Served(name, name, None)


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]
