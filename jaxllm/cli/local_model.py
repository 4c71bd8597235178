"""A chat model that runs in an engine of this process."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxllm.cli.conversation import Message, note
from jaxllm.errors import JaxLLMError
from jaxllm.frontend.tokenizer import render_chat
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.prompts import TokensPrompt
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxllm.frontend.llm_engine import LLMEngine


class LocalModel:
    """Streams answers from the engine, step by step."""

    def __init__(
        self, engine: "LLMEngine", params: SamplingParams, *, chat_template: str | None = None
    ):
        assert engine.tokenizer is not None, "chat has no flag to leave the tokenizer out"
        self._engine = engine
        self._tokenizer = engine.tokenizer
        self._params = params.clone(output_kind=RequestOutputKind.DELTA)
        self._template = chat_template
        self._ids = map(str, itertools.count())

    def fits(self, messages: Sequence[Message]) -> bool:
        """Whether the messages leave room for an answer: a quarter of the context, or --max-tokens
        if that is less."""
        limit = self._engine.info.max_model_len
        room = min(limit // 4, self._params.max_tokens or limit)
        return len(self._render(messages)["prompt_token_ids"]) + room <= limit

    def answer(self, messages: Sequence[Message], stop: threading.Event) -> Iterator[str]:
        request_id = next(self._ids)
        self._engine.add_request(request_id, self._render(messages), self._params)
        return self._stream(request_id, stop)

    def _stream(self, request_id: str, stop: threading.Event) -> Iterator[str]:
        last: CompletionOutput | None = None
        while self._engine.has_unfinished_requests():
            if stop.is_set():
                self._engine.abort_request(request_id)
            for output in self._engine.step():
                assert isinstance(output, RequestOutput)  # an engine that pools does not chat
                [last] = output.outputs
                yield last.text
        if last is not None and last.finish_reason == "error":
            raise JaxLLMError(f"the answer ended in an error: {last.stop_reason}")
        if last is not None and last.finish_reason == "length":
            note("\nThe answer has reached its longest length.")

    def _render(self, messages: Sequence[Message]) -> TokensPrompt:
        return render_chat(self._tokenizer, list(messages), chat_template=self._template)
