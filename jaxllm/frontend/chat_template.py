"""A conversation, and the chat template that makes a prompt of it.

A template is a program: in a sandbox, but it may run for ever. Whoever cannot trust it, or what it
gets to see, renders it where it can be ended: see `jaxllm.frontend.template_process`.
"""

from typing import Any

import msgspec

from jaxllm.errors import ValidationError
from jaxllm.sampling_params import check_is_text


class Conversation(msgspec.Struct, kw_only=True):
    """All that a template gets to see, as plain data, and the template."""

    template: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]  # special tokens, and what the request brings


class Renderer:
    """Renders conversations, here and now."""

    def render(self, conversation: Conversation, *, is_foreign: bool) -> str:
        """The prompt. `is_foreign` says that a request has brought the template, or variables that
        make it do other than it was written for."""
        return render(conversation)


def render(conversation: Conversation) -> str:
    """The prompt; raises ValidationError if the template does not take this conversation."""
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
