"""The paths of this protocol."""

from jaxllm.anthropic.answer import answer_message
from jaxllm.anthropic.errors import MessagesError, in_its_shape
from jaxllm.anthropic.request import MessagesRequest
from jaxllm.anthropic.stream import MessageStream
from jaxllm.openai.endpoints import Endpoint
from jaxllm.openai.wire import Wire

ANTHROPIC = Wire(error=in_its_shape, error_type=MessagesError, names_events=True, last=b"")
MESSAGES = Endpoint(MessagesRequest, answer_message, MessageStream, ANTHROPIC)
