"""/tokenize and /detokenize: token ids of a text or a conversation, and the text of token ids."""

from dataclasses import dataclass
from typing import Any

import msgspec

from jaxllm.errors import ValidationError, refused
from jaxllm.frontend.long_text import TooLongToTell, TooManyTokens
from jaxllm.frontend.tokenizer import Tokenizer
from jaxllm.openai.chat import ChatRequest
from jaxllm.openai.fields import read_fields
from jaxllm.openai.served_model import ServedModel
from jaxllm.openai.tools import Tool
from jaxllm.sampling_params import check_is_text
from jaxllm.server.service import Service


class TokenizeText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A conversation: the fields of a chat request that determine its prompt."""

    messages: list[dict[str, Any]]
    model: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    documents: list[dict[str, Any]] | None = None
    add_special_tokens: bool = False  # most templates add them
    return_token_strs: bool = False


class Tokenized(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class Detokenized(msgspec.Struct):
    prompt: str


@dataclass(frozen=True, slots=True)
class MostTokens:
    """The limit of tokens in a request. It is larger than the longest prompt."""

    num: int

    @classmethod
    def of(cls, service: Service) -> "MostTokens":
        default = max(1 << 16, 4 * service.engine.info.max_model_len)
        return cls(service.options.max_tokenize_tokens or default)

    def encode(
        self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        try:
            ids = tokenizer.encode_at_most(text, self.num, add_special_tokens=add_special_tokens)
        except TooManyTokens as error:
            raise self._refused("prompt", f"at least {error.at_least} tokens") from None
        except TooLongToTell as error:
            raise self._refused("prompt", f"more than {error.most_chars} characters") from None
        if len(ids) > self.num:
            raise self._refused("prompt", f"{len(ids)} tokens")
        return ids

    def check(self, ids: list[int]) -> None:
        if len(ids) > self.num:
            raise self._refused("tokens", f"{len(ids)} tokens")

    def _refused(self, name: str, given: str) -> ValidationError:
        return ValidationError(
            f"{name}={given!r}: at most {self.num} tokens in one request; split it, or start the "
            "server with a greater --max-tokenize-tokens",
            parameter=name,
        )


def tokenize(service: Service, body: object) -> Tokenized:
    """The token ids of a text or a conversation."""
    tokenizer, most = _tokenizer(service), MostTokens.of(service)
    if isinstance(body, dict) and "messages" in body:
        request = read_fields(body, TokenizeChat)
        service.served.check_name(request.model)
        ids = _chat_ids(request, service.served, most)
    else:
        request = read_fields(body, TokenizeText)
        service.served.check_name(request.model)
        check_is_text("prompt", request.prompt)
        special = request.add_special_tokens
        ids = most.encode(tokenizer, request.prompt, add_special_tokens=special)
    strings: Any = None
    if request.return_token_strs:
        strings = tokenizer.hf.convert_ids_to_tokens(ids)
    return Tokenized(
        count=len(ids),
        max_model_len=service.engine.info.max_model_len,
        tokens=ids,
        token_strs=strings,
    )


def _chat_ids(request: TokenizeChat, served: ServedModel, most: MostTokens) -> list[int]:
    chat = ChatRequest(
        messages=request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
        tools=request.tools,
        tool_choice=request.tool_choice,
        documents=request.documents,
        add_special_tokens=request.add_special_tokens,
    )
    return chat.prompt(served, most)["prompt_token_ids"]


def detokenize(service: Service, body: object) -> Detokenized:
    """The text of token ids, including special tokens."""
    request = read_fields(body, DetokenizeRequest)
    service.served.check_name(request.model)
    tokenizer, size = _tokenizer(service), service.engine.info.vocab_size
    MostTokens.of(service).check(request.tokens)
    wrong = [token for token in request.tokens if not 0 <= token < size]
    if wrong:
        raise refused("tokens", wrong[0], f"ids of this model are 0 to {size - 1}")
    return Detokenized(tokenizer.decode(request.tokens, skip_special_tokens=False))


def _tokenizer(service: Service) -> Tokenizer:
    if service.served.tokenizer is None:
        raise ValidationError("there is no tokenizer: skip_tokenizer_init=True")
    return service.served.tokenizer
