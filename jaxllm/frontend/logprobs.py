"""Logprobs as users see them: one dict per position, token id -> Logprob."""

from collections.abc import Callable

from jaxllm.messages import PositionLogprobs
from jaxllm.outputs import Logprob


def logprobs_by_token(
    position: PositionLogprobs, token_text: Callable[[int], str] | None
) -> dict[int, Logprob]:
    """Return the entries of one position: first the token at the position, then the most likely
    tokens in order. There are k entries, or k + 1 if the token is not one of the k likeliest."""
    text = token_text or _no_text
    token_ids, logprobs = position.token_ids, position.logprobs
    token = token_ids[0]
    entries = {token: Logprob(logprobs[0], position.rank, text(token))}
    for rank in range(1, len(token_ids)):
        token = token_ids[rank]
        # The token at the position may come again: then its place in the order is its rank.
        entries[token] = Logprob(logprobs[rank], rank, text(token))
    return entries


def _no_text(token_id: int) -> None:
    return None
