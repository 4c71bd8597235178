"""/v1/messages/count_tokens: the tokens of a conversation in Anthropic's form."""

import msgspec

from jaxllm.anthropic.request import CountTokensRequest, chat_fields, in_its_words, without_neutral
from jaxllm.errors import ValidationError
from jaxllm.openai.chat import ChatRequest
from jaxllm.openai.fields import read_fields
from jaxllm.server.service import Service
from jaxllm.server.tokenize import MostTokens


class TokenCount(msgspec.Struct):
    input_tokens: int


def count_tokens(service: Service, body: object) -> TokenCount:
    """Count the tokens of the prompt that a request with these fields would have."""
    request = read_fields(without_neutral(body), CountTokensRequest)
    service.served.check_name(request.model)
    given = {name: value for name, value in chat_fields(request).items() if value is not None}
    try:
        chat = ChatRequest.read(given)
        prompt = chat.prompt(service.served, MostTokens.of(service))
    except ValidationError as error:
        raise in_its_words(error) from error
    return TokenCount(len(prompt["prompt_token_ids"]))
