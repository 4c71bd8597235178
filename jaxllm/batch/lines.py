"""Input lines: each is a request in one of two forms, and its result has the same form.

OpenAI's batch form:  {"custom_id": ..., "method": "POST", "url": "/v1/...", "body": {...}}
The plain form:       {"prompt": ...} or {"prompt_token_ids": [...]}, and sampling parameters; its
                      "model" may name an adapter
"""

import difflib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from jaxllm.batch.custom_ids import CustomIds
from jaxllm.batch.input import Item
from jaxllm.errors import ValidationError, refused
from jaxllm.lora.request import LoRARequest
from jaxllm.openai.answer import check_finished
from jaxllm.openai.batch_endpoints import BATCH_ENDPOINTS, find_batch_endpoint
from jaxllm.openai.endpoints import Endpoint, Request
from jaxllm.openai.errors import error_body
from jaxllm.openai.logprobs import Position
from jaxllm.openai.pooling.endpoints import POOLING_PATHS
from jaxllm.openai.pooling.fields import PoolingRequest, Work
from jaxllm.openai.served_model import ServedModel
from jaxllm.openai.wording import why_not_json
from jaxllm.outputs import CompletionOutput
from jaxllm.parsers.reasoning.base import Reasoning
from jaxllm.prompts import PromptType, TextPrompt, TokensPrompt
from jaxllm.sampling_params import RequestOutputKind, SamplingParams


class LineError(ValidationError):
    """The line is not a request, or its custom_id is a duplicate."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


class Line(Protocol):
    """A line in one of the forms, valid or not."""

    custom_id: str | None
    body: object  # of the request, if the line has one

    def read(self, served: ServedModel) -> "Prompts | PooledPrompts":
        """Return the line's prompts; raise ValidationError if it is invalid."""
        ...

    def in_its_words(self, error: ValidationError, place: int) -> ValidationError:
        """Rename the fields in an engine's error to their names in the line."""
        ...

    def answer(self, outputs: Sequence[Any], served: ServedModel) -> bytes:
        """Make the result from the last outputs of all prompts; raise AnswerError."""
        ...

    def error(self, error: Exception) -> bytes:
        """Make the result of a line without an answer."""
        ...


class Prompts(msgspec.Struct, frozen=True):
    """The input of the engine for a line."""

    prompts: list[PromptType]
    params: SamplingParams
    priority: int
    truncate_prompt_tokens: int | None
    reasoning: Reasoning | None = None  # before the form of the answers, if they have one
    num_copies: int = 0  # how often the answer contains each prompt
    lora_request: LoRARequest | None = None


class PooledPrompts(msgspec.Struct, frozen=True):
    """The input of an engine that pools for a line."""

    work: Work
    priority: int
    lora_request: LoRARequest | None = None


class LineReader:
    """Detects the form of each line, and duplicate custom_ids."""

    def __init__(self, batch_id: str, custom_ids: CustomIds, url: str | None = None):
        """With a `url`, all lines must be requests to it, in OpenAI's form."""
        self._batch_id = batch_id
        self._custom_ids = custom_ids
        self._url = url

    def skip(self, item: Item) -> None:
        """Record the custom_id of a line that an earlier run finished."""
        self.read(item)

    def read(self, item: Item) -> Line:
        """Read a line. Lines must come in order: of several with one custom_id, only the first is
        valid."""
        try:
            fields = _decode(item.text)
        except LineError as error:
            return BadLine(self._batch_id, item, None, error)
        is_plain = "prompt" in fields or "prompt_token_ids" in fields
        custom_id = fields.get("custom_id")
        try:
            if custom_id is None:
                if not is_plain:
                    raise LineError("invalid_line", _NO_FORM)
            elif not isinstance(custom_id, str):
                custom_id = None
                raise LineError("invalid_line", "'custom_id' must be a string")
            elif not self._custom_ids.add(custom_id):
                raise LineError(
                    "duplicate_custom_id", f"custom_id {custom_id!r:.80} is on an earlier line, too"
                )
            self._check_url(fields)
        except LineError as error:
            return BadLine(self._batch_id, item, custom_id, error)
        if is_plain:
            return PlainLine(item, fields, custom_id)
        return BatchLine(self._batch_id, item, fields, custom_id)

    def _check_url(self, fields: dict[str, Any]) -> None:
        if self._url is None:
            return
        if not {"custom_id", "url", "body"} <= fields.keys():
            raise LineError("invalid_line", "'custom_id', 'method', 'url' and 'body' are wanted")
        if fields["url"] != self._url:
            given = fields["url"]
            raise LineError("mismatched_url", f"url={given!r:.80}: this batch is for {self._url}")


_NO_FORM = (
    "an object with 'custom_id', 'method', 'url' and 'body' is wanted, or one with 'prompt' or "
    "'prompt_token_ids'"
)


def _decode(text: str | ValidationError) -> dict[str, Any]:
    if isinstance(text, ValidationError):
        raise LineError("invalid_line", str(text))
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError("invalid_json", f"not JSON: {why_not_json(text, error)}") from None
    if not isinstance(fields, dict):
        raise LineError("invalid_line", _NO_FORM)
    return fields


class BatchLine:
    """A line in OpenAI's batch form."""

    def __init__(self, batch_id: str, item: Item, fields: dict[str, Any], custom_id: str | None):
        self.custom_id = custom_id
        self._fields = fields
        self.body: object = fields.get("body")
        self._answer_id = f"{batch_id}-{item.number}"
        self._endpoint: Endpoint | None = None
        self._request: Request | PoolingRequest | None = None
        self._served: ServedModel | None = None  # as the line names it
        self._work: Work | None = None  # of a line whose prompts are pooled

    def read(self, served: ServedModel) -> Prompts | PooledPrompts:
        unknown = self._fields.keys() - {"custom_id", "method", "url", "body"}
        if unknown:
            raise refused("line", sorted(unknown), "a batch line has no such fields")
        method, url = self._fields.get("method", "POST"), self._fields.get("url")
        if method != "POST":
            raise refused("method", method, "it must be 'POST'")
        if not isinstance(url, str):
            raise refused(
                "url", url, f"it must be {' or '.join((*BATCH_ENDPOINTS, *POOLING_PATHS))}"
            )
        if served.pooling is not None and url in POOLING_PATHS:
            return self._read_pooling(POOLING_PATHS[url][0], served)
        self._endpoint = find_batch_endpoint(url)
        self._request = request = self._endpoint.request.read(self.body)
        self._served = served = served.named(request.model)
        return Prompts(
            request.prompts(served),
            request.sampling_params(served),
            request.priority or 0,
            request.truncate_prompt_tokens,
            request.reasoning(served),
            num_copies=request.num_prompt_copies,
            lora_request=served.lora_request,
        )

    def _read_pooling(self, kind: type[PoolingRequest], served: ServedModel) -> PooledPrompts:
        self._request = request = kind.read(self.body)
        served = served.named(request.model)
        self._work = request.work(served)
        return PooledPrompts(self._work, request.priority or 0, served.lora_request)

    def in_its_words(self, error: ValidationError, place: int) -> ValidationError:
        assert self._request is not None, "it was not read"
        return self._request.in_its_words(error, place)

    def answer(self, outputs: Sequence[Any], served: ServedModel) -> bytes:
        created, served = int(time.time()), self._served or served
        if self._work is not None:
            return self._record(200, self._work.answer(self._answer_id, created, outputs))
        assert self._endpoint is not None, "it was not read"
        body = self._endpoint.answer(self._request, self._answer_id, created, outputs, served)
        return self._record(200, body)

    def error(self, error: Exception) -> bytes:
        body = error_body(error)
        return self._record(body.error.code, body)

    def _record(self, status: int, body: object) -> bytes:
        response = {"status_code": status, "request_id": f"req_{self._answer_id}", "body": body}
        return _batch_record(self._answer_id, self.custom_id, response, None)


class BadLine:
    """A line that is not a request. Its error has OpenAI's batch form, whatever its form is."""

    def __init__(self, batch_id: str, item: Item, custom_id: str | None, error: LineError):
        self.custom_id = custom_id
        self.body: object = None
        self._id = f"{batch_id}-{item.number}"
        self._line = item.line
        self._error = error

    def read(self, served: ServedModel) -> Prompts:
        raise self._error

    def in_its_words(self, error: ValidationError, place: int) -> ValidationError:
        return error

    def answer(self, outputs: Sequence[Any], served: ServedModel) -> bytes:
        raise self._error

    def error(self, error: Exception) -> bytes:
        code = error.code if isinstance(error, LineError) else "internal_error"
        said = {"code": code, "message": f"line {self._line}: {error}"}
        return _batch_record(self._id, self.custom_id, None, said)


def _batch_record(
    id: str, custom_id: str | None, response: object, error: dict[str, str] | None
) -> bytes:
    record = {
        "id": f"batch_req_{id}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(record)


class PlainLine:
    """A line in the plain form."""

    def __init__(self, item: Item, fields: dict[str, Any], custom_id: str | None):
        self.custom_id = custom_id
        self.body: object = None
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self._line = item.line

    def read(self, served: ServedModel) -> Prompts:
        fields = dict(self._fields)
        for name in fields.keys() - _PLAIN_FIELDS:
            near = difflib.get_close_matches(name, _PLAIN_FIELDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise refused(name, fields[name], f"there is no such field{hint}")
        prompt = {name: fields.pop(name) for name in _PROMPT_FIELDS if name in fields}
        fields.pop("custom_id", None)
        priority = fields.pop("priority", 0)
        truncate = fields.pop("truncate_prompt_tokens", None)
        served = served.named(fields.pop("model", None))
        params = served.default_params.clone(**fields, output_kind=RequestOutputKind.FINAL_ONLY)
        adapter = served.lora_request
        return Prompts([_as_prompt(prompt)], params, priority, truncate, lora_request=adapter)

    def in_its_words(self, error: ValidationError, place: int) -> ValidationError:
        return error  # plain lines have the engine's field names

    def answer(self, outputs: Sequence[Any], served: ServedModel) -> bytes:
        check_finished(outputs)
        (output,) = outputs
        record = PlainRecord(
            line=self._line,
            custom_id=self.custom_id,
            prompt=output.prompt,
            prompt_token_ids=output.prompt_token_ids,
            outputs=[_plain_output(one) for one in output.outputs],
            prompt_logprobs=output.prompt_logprobs,
            num_cached_tokens=output.num_cached_tokens or 0,
        )
        return msgspec.json.encode(record)

    def error(self, error: Exception) -> bytes:
        record = {"line": self._line, "custom_id": self.custom_id, "error": error_body(error).error}
        return msgspec.json.encode(record)


_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")
_PLAIN_FIELDS = {
    *_PROMPT_FIELDS,
    "custom_id",
    "model",
    "priority",
    "truncate_prompt_tokens",
    *SamplingParams.__struct_fields__,
} - {"output_kind"}


def _as_prompt(fields: Mapping[str, Any]) -> PromptType:
    """Make the prompt; the engine validates the types."""
    if "prompt_token_ids" in fields:
        return TokensPrompt(**fields)
    return TextPrompt(**fields)


class PlainOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One of the n answers of a plain line; logprobs only if requested."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    cumulative_logprob: float | None = None
    logprobs: list[Position] | None = None


class PlainRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer to a plain line. `line` is its line number in the file, from 1."""

    line: int
    custom_id: str | None
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[PlainOutput]
    prompt_logprobs: list[Position | None] | None = None
    num_cached_tokens: int


def _plain_output(one: CompletionOutput) -> PlainOutput:
    return PlainOutput(
        index=one.index,
        text=one.text,
        token_ids=one.token_ids,
        finish_reason=one.finish_reason,
        stop_reason=one.stop_reason,
        cumulative_logprob=one.cumulative_logprob if one.logprobs is not None else None,
        logprobs=one.logprobs,
    )
