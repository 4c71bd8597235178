"""How much may be under way at once: what comes above it is refused, and may come again later."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

from jaxllm.errors import refused
from jaxllm.messages import EngineInfo
from jaxllm.openai.errors import UnavailableError
from jaxllm.sampling_params import SamplingParams


class Admission:
    """Counts answers, tokens of prompts and bytes of bodies under way. `None` means no limit."""

    def __init__(self, max_answers: int | None, max_tokens: int | None, max_bytes: int):
        self._max_answers = max_answers
        self._max_tokens = max_tokens
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self.num_answers = 0
        self.num_tokens = 0
        # By the limit that was met.
        self.num_refused = {
            "max_queued_bytes": 0,
            "max_queued_requests": 0,
            "max_queued_tokens": 0,
        }

    @contextlib.contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """What is called for every part of a body; it is under way within this context."""
        held = 0

        def admit(num: int) -> None:
            nonlocal held
            self._check(self.num_bytes + num > self._max_bytes, "max_queued_bytes")
            held += num
            self.num_bytes += num

        try:
            yield admit
        finally:
            self.num_bytes -= held

    @contextlib.contextmanager
    def answers(self, num: int) -> Iterator[None]:
        """So many answers are under way within this context."""
        if self._max_answers is not None:
            if num > self._max_answers:
                raise refused(
                    "n",
                    f"{num} answers",
                    f"one request may have at most {self._max_answers}; split it, or start the "
                    "server with a greater --max-queued-requests",
                )
            self._check(self.num_answers + num > self._max_answers, "max_queued_requests")
        self.num_answers += num
        try:
            yield
        finally:
            self.num_answers -= num

    @contextlib.contextmanager
    def tokens(self, num: int) -> Iterator[None]:
        """So many tokens of prompts are under way within this context."""
        if self._max_tokens is not None:
            if num > self._max_tokens:
                raise refused(
                    "prompt",
                    f"{num} tokens",
                    f"one request may have at most {self._max_tokens}; split it, or start the "
                    "server with a greater --max-queued-tokens",
                )
            self._check(self.num_tokens + num > self._max_tokens, "max_queued_tokens")
        self.num_tokens += num
        try:
            yield
        finally:
            self.num_tokens -= num

    def _check(self, is_full: bool, limit: str) -> None:
        if is_full:
            self.num_refused[limit] += 1
            flag = "--" + limit.replace("_", "-")
            raise UnavailableError(f"too many requests are under way ({flag}); try again later")


def check_logprobs(
    params: SamplingParams, prompt_lengths: Iterable[int], info: EngineInfo, most: int
) -> None:
    """Refuse a request whose logprobs would be too many, at the longest that its answers can be.
    Their number at one position has a limit of its own."""
    of_answers, of_prompts = (
        0 if wanted is None else (info.vocab_size if wanted < 0 else wanted) + 1
        for wanted in (params.logprobs, params.prompt_logprobs)
    )
    total = 0
    for length in prompt_lengths:
        room = max(0, info.max_model_len - length)
        longest = room if params.max_tokens is None else min(params.max_tokens, room)
        total += params.n * longest * of_answers + length * of_prompts
    if total > most:
        raise refused(
            "logprobs",
            f"{total} at all positions",
            f"one request may have at most {most}; ask for fewer, lower max_tokens or n, or start "
            "the server with a greater --max-request-logprobs",
        )
