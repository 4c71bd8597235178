"""/tokenize and /detokenize: what the model sees of a text or a conversation, and back."""

from typing import Any

import msgspec

from jaxllm.errors import ValidationError, refused
from jaxllm.frontend.tokenizer import Tokenizer
from jaxllm.openai.chat import ChatRequest
from jaxllm.openai.fields import read_fields
from jaxllm.sampling_params import check_is_text
from jaxllm.server.service import Service

# Of a body with "messages", what is a chat request's; the rest is this request's own.
_OWN = ("add_special_tokens", "return_token_strs")


class TokenizeText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of a conversation, what is not a chat request's: the template writes special tokens."""

    add_special_tokens: bool = False
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
        own = {name: body[name] for name in _OWN if name in body}
        rest = {name: value for name, value in body.items() if name not in _OWN}
        chat, options = ChatRequest.read(rest, live=True), read_fields(own, TokenizeOptions)
        service.served.check_name(chat.model)
        if options.add_special_tokens:
            raise refused("add_special_tokens", True, "the chat template writes them; leave it out")
        (prompt,) = chat.prompts(service.served)
        assert isinstance(prompt, dict) and "prompt_token_ids" in prompt
        ids, wants_strings = prompt["prompt_token_ids"], options.return_token_strs
    else:
        request = read_fields(body, TokenizeText)
        service.served.check_name(request.model)
        check_is_text("prompt", request.prompt)
        ids = tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens)
        wants_strings = request.return_token_strs
    strings: Any = tokenizer.hf.convert_ids_to_tokens(ids) if wants_strings else None
    return Tokenized(
        count=len(ids),
        max_model_len=service.engine.info.max_model_len,
        tokens=ids,
        token_strs=strings,
    )


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
