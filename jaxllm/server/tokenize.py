"""/tokenize and /detokenize: what the model sees of a text or a conversation, and back."""

from typing import Any, Literal

import msgspec

from jaxllm.errors import ValidationError, refused
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
    """A conversation: of a chat request, what its prompt is made of."""

    messages: list[dict[str, Any]]
    model: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    add_special_tokens: Literal[False] = False  # the template writes them
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


def tokenize(service: Service, body: object) -> Tokenized:
    """The token ids of a text or a conversation."""
    tokenizer = _tokenizer(service)
    if isinstance(body, dict) and "messages" in body:
        request = read_fields(body, TokenizeChat)
        service.served.check_name(request.model)
        ids = _chat_ids(request, service.served)
    else:
        request = read_fields(body, TokenizeText)
        service.served.check_name(request.model)
        check_is_text("prompt", request.prompt)
        ids = tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens)
    strings: Any = None
    if request.return_token_strs:
        strings = tokenizer.hf.convert_ids_to_tokens(ids)
    return Tokenized(
        count=len(ids),
        max_model_len=service.engine.info.max_model_len,
        tokens=ids,
        token_strs=strings,
    )


def _chat_ids(request: TokenizeChat, served: ServedModel) -> list[int]:
    chat = ChatRequest(
        messages=request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
        tools=request.tools,
        tool_choice=request.tool_choice,
    )
    (prompt,) = chat.prompts(served)
    assert isinstance(prompt, dict) and "prompt_token_ids" in prompt
    return prompt["prompt_token_ids"]


def detokenize(service: Service, body: object) -> Detokenized:
    """The text of token ids, with the special ones."""
    request = read_fields(body, DetokenizeRequest)
    service.served.check_name(request.model)
    tokenizer, size = _tokenizer(service), service.engine.info.vocab_size
    wrong = [token for token in request.tokens if not 0 <= token < size]
    if wrong:
        raise refused("tokens", wrong[0], f"ids of this model are 0 to {size - 1}")
    return Detokenized(tokenizer.decode(request.tokens, skip_special_tokens=False))


def _tokenizer(service: Service) -> Tokenizer:
    if service.served.tokenizer is None:
        raise ValidationError("there is no tokenizer: skip_tokenizer_init=True")
    return service.served.tokenizer
