"""Embeddings of prompts on the host: which of them a step needs.

A token is computed once, so its embedding travels to the device with the step that computes it, and
is kept on the host alone. After a preemption it travels again.
"""

from collections.abc import Sequence

import numpy as np

from jaxllm.prompt_embeds.item import EmbedsSpec
from jaxllm.prompt_embeds.slice import NAME, NO_ROW
from jaxllm.scheduler.features import Drafted, Nothing
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.schedule import Schedule, StepResult


class PromptEmbeds:
    """The feature's host half."""

    name = NAME

    def __init__(self, spec: EmbedsSpec) -> None:
        self._first_row = spec.first_row
        self._using: dict[str, np.ndarray] = {}  # uint8 [tokens, bytes], of prompts

    def add(self, request: Request) -> None:
        if request.embeds is not None:
            data = np.frombuffer(request.embeds.data, np.uint8)
            self._using[request.request_id] = data.reshape(request.num_prompt_tokens, -1)

    def ready(self, *, wait: bool) -> Sequence[Request]:
        return ()

    def drop(self, request: Request) -> None:
        self._using.pop(request.request_id, None)

    def start_over(self, request: Request) -> None:
        pass  # they are kept, since a request that was preempted reads them again, too

    def lose(self) -> None:
        pass  # the device keeps nothing of it

    def limit(self, request: Request, n: int, budget: int) -> int:
        return n

    def draft(self, rows: Sequence[Request], num_tokens: np.ndarray) -> Drafted | None:
        if not self._using:
            return None
        pieces: list[np.ndarray] = []
        rows_given: np.ndarray | None = None
        firsts = np.cumsum(num_tokens) - num_tokens
        next_row = self._first_row
        for row, request in enumerate(rows):
            its = self._using.get(request.request_id)
            start = request.num_computed_tokens - int(num_tokens[row])
            if its is None or start >= len(its):
                continue
            piece = its[start : request.num_computed_tokens]
            if rows_given is None:
                rows_given = np.full(int(num_tokens.sum()), NO_ROW, np.int32)
            first = int(firsts[row])
            rows_given[first : first + len(piece)] = np.arange(next_row, next_row + len(piece))
            next_row += len(piece)
            pieces.append(piece)
        if rows_given is None:
            return None
        given = {"rows": rows_given, "data": np.concatenate(pieces)}
        return Drafted(given, needs_mixed=True, wants_logits=False)

    def read(
        self, schedule: Schedule, result: StepResult, rows: Sequence[Request | None]
    ) -> Nothing:
        return Nothing()
