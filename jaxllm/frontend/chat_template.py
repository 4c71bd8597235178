"""A conversation, and the chat template that turns it into a prompt.

A template is a program. It runs in a sandbox, but may run for ever. A caller that does not trust
the template or its input renders in a process that can be killed: see
`jaxllm.frontend.template_process`.
"""

from typing import Any

import msgspec

from jaxllm.errors import ValidationError
from jaxllm.sampling_params import check_is_text


class Conversation(msgspec.Struct, kw_only=True):
    """A template and all its input, as plain data."""

    template: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]  # special tokens, and the request's chat_template_kwargs


class Renderer:
    """Renders conversations in this thread."""

    def render(self, conversation: Conversation, *, is_foreign: bool) -> str:
        """Return the prompt. `is_foreign` says that a request brought the template or variables, so
        the template may behave in any way."""
        return render(conversation)


def render(conversation: Conversation) -> str:
    """Return the prompt; raise ValidationError if the template refuses the conversation."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        (text,), _ = render_jinja_template(
            conversations=[conversation.messages],
            tools=conversation.tools,  # pyright: ignore[reportArgumentType]  (invariant list)
            chat_template=conversation.template,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            **conversation.variables,
        )
    except Exception as error:  # a template may raise anything
        reason = str(error) or type(error).__name__
        raise ValidationError(
            f"the chat template refuses these messages: {reason}", parameter="messages"
        ) from error
    check_is_text("messages", text)
    return text
