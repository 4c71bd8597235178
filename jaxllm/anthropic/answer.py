"""A whole answer to a message request."""

from collections.abc import Sequence

from jaxllm.anthropic.message import (
    Message,
    add_up,
    hides_thinking,
    usage_of,
    why_it_stopped,
)
from jaxllm.anthropic.request import MessagesRequest
from jaxllm.openai.answer import check_finished
from jaxllm.openai.blocks import Blocks
from jaxllm.openai.served_model import ServedModel
from jaxllm.outputs import RequestOutput


def answer_message(
    request: MessagesRequest,
    answer_id: str,
    created: int,
    outputs: Sequence[RequestOutput],
    served: ServedModel,
) -> Message:
    """Make the body of the answer; raise if the engine failed."""
    check_finished(outputs)
    (output,) = outputs
    (one,) = output.outputs
    parser = request.chat.parser(output.prompt, served)
    blocks = Blocks()
    deltas = [*parser.feed(one.text, one.token_ids), *parser.finish()]
    pieces = [*blocks.feed(deltas), *blocks.finish()]
    num_tokens = len(output.prompt_token_ids) + len(one.token_ids)
    stop = why_it_stopped(request, served, one, num_tokens=num_tokens, has_calls=blocks.has_calls)
    return Message(
        id=request.id_of(answer_id),
        model=served.names[0],
        content=add_up(pieces, hides_thinking=hides_thinking(request)),
        stop_reason=stop,
        stop_sequence=str(one.stop_reason) if stop == "stop_sequence" else None,
        usage=usage_of(output, len(one.token_ids)),
    )
