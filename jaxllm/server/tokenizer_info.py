"""/tokenizer_info: how the tokenizer was configured, and its chat template."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.errors import ValidationError
from jaxllm.server.errors import json_response
from jaxllm.server.service import Service

# Places on this machine, and what is no configuration.
_PLACES = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path", "tokenizer_object")


async def tokenizer_info(service: Service, request: Request) -> Response:
    tokenizer = service.served.tokenizer
    if tokenizer is None:
        raise ValidationError("there is no tokenizer: skip_tokenizer_init=True")
    hf = tokenizer.hf
    given: dict[str, Any] = {
        name: value for name, value in hf.init_kwargs.items() if name not in _PLACES
    }
    given["tokenizer_class"] = type(hf).__name__
    given["chat_template"] = service.served.chat_template or hf.chat_template
    # Added tokens are objects, of which the text is what others write.
    given["added_tokens_decoder"] = {
        str(number): token.content for number, token in hf.added_tokens_decoder.items()
    }
    return json_response(msgspec.to_builtins(given, enc_hook=str))
