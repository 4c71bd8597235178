"""Limits of the work under way. A request above a limit is refused; its client may retry later."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

from jaxllm.errors import refused
from jaxllm.messages import EngineInfo
from jaxllm.openai.errors import UnavailableError
from jaxllm.plural import counted
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.peers import Peers

_ANSWERS, _TOKENS, _BYTES = range(3)


class Admission:
    """Counts answers, prompt tokens and body bytes under way. `None` means no limit.

    A limit holds for all frontends together. A request is counted first and compared with the limit
    then. So two concurrent requests may both be refused, but never both pass if only one fits.
    """

    def __init__(
        self, max_answers: int | None, max_tokens: int | None, max_bytes: int, peers: Peers
    ):
        self.max_answers = max_answers  # also the limit of one request
        self._max_tokens = max_tokens
        self._max_bytes = max_bytes
        self._peers = peers
        # Refusals by this frontend, by limit.
        self.num_refused = {
            "max_queued_bytes": 0,
            "max_queued_requests": 0,
            "max_queued_tokens": 0,
        }

    @property
    def num_answers(self) -> int:
        return self._peers.total(_ANSWERS)

    @property
    def num_tokens(self) -> int:
        return self._peers.total(_TOKENS)

    @property
    def num_bytes(self) -> int:
        return self._peers.total(_BYTES)

    @contextlib.contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Yield a function to call for every part of a body, which counts within this context."""
        held = 0

        def admit(num: int) -> None:
            nonlocal held
            self._admit(_BYTES, num, self._max_bytes, "max_queued_bytes")
            held += num

        try:
            yield admit
        finally:
            self._peers.count(_BYTES, -held)

    def check_answers(self, num: int) -> None:
        """Refuse a request for more answers than the server ever has at once."""
        if self.max_answers is not None and num > self.max_answers:
            raise refused(
                "n",
                counted(num, "answer"),
                f"one request may have at most {self.max_answers}; split it, or start the "
                "server with a greater --max-queued-requests",
            )

    @contextlib.contextmanager
    def answers(self, num: int) -> Iterator[None]:
        """Count `num` answers within this context."""
        self.check_answers(num)
        self._admit(_ANSWERS, num, self.max_answers, "max_queued_requests")
        try:
            yield
        finally:
            self._peers.count(_ANSWERS, -num)

    @contextlib.contextmanager
    def tokens(self, num: int) -> Iterator[None]:
        """Count `num` prompt tokens within this context."""
        if self._max_tokens is not None and num > self._max_tokens:
            raise refused(
                "prompt",
                counted(num, "token"),
                f"one request may have at most {self._max_tokens}; split it, or start the "
                "server with a greater --max-queued-tokens",
            )
        self._admit(_TOKENS, num, self._max_tokens, "max_queued_tokens")
        try:
            yield
        finally:
            self._peers.count(_TOKENS, -num)

    def _admit(self, kind: int, num: int, most: int | None, limit: str) -> None:
        total = self._peers.count(kind, num)
        if most is not None and total > most:
            self._peers.count(kind, -num)
            self.num_refused[limit] += 1
            flag = "--" + limit.replace("_", "-")
            raise UnavailableError(f"too many requests are under way ({flag}); try again later")


def check_logprobs(
    params: SamplingParams,
    prompt_lengths: Iterable[int],
    info: EngineInfo,
    most: int,
    *,
    num_shown: int,
) -> None:
    """Refuse a request that may need too many logprobs if its answers have their maximum length.
    Another limit applies to logprobs per position.

    Args:
      num_shown: how often the answer shows each prompt. A token without logprobs counts as one.
    """
    of_answers, of_prompts = (
        0 if wanted is None else (info.vocab_size if wanted < 0 else wanted) + 1
        for wanted in (params.logprobs, params.prompt_logprobs)
    )
    total = 0
    for length in prompt_lengths:
        room = max(0, info.max_model_len - length)
        longest = room if params.max_tokens is None else min(params.max_tokens, room)
        total += params.n * longest * of_answers + num_shown * length * max(1, of_prompts)
    if total > most:
        raise refused(
            "logprobs",
            f"{total} at all positions",
            f"one request may have at most {most}, each prompt counted as often as the answer "
            "shows it; ask for fewer, lower max_tokens or n, or start the server with a greater "
            "--max-request-logprobs",
        )
