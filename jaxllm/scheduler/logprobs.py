"""Takes each request's logprobs out of the arrays that a step brought.

A step computes MAX_STEP_LOGPROBS for a position at most. Whoever wants more gets them made here, of
the position's logits: the cost is the request's own, and the step is no slower for the others.
"""

from collections.abc import Sequence

import numpy as np

from jaxllm.messages import PositionLogprobs
from jaxllm.sampling_params import MAX_STEP_LOGPROBS
from jaxllm.scheduler.draft import PromptSpan
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.schedule import LogprobArrays, StepResult


def row_logprobs(
    arrays: LogprobArrays, index: int, count: int, logits: np.ndarray | None = None
) -> PositionLogprobs:
    """Return the logprobs at one position: of the token there, and of the `count` best ones. The
    position's logits, [V], are needed only for more than a step computes."""
    rank = int(arrays.ranks[index])
    if count <= MAX_STEP_LOGPROBS:
        token_ids, logprobs = arrays.token_ids[index, : 1 + count], arrays.logprobs[index]
        return PositionLogprobs(token_ids.tolist(), logprobs[: 1 + count].tolist(), rank)
    assert logits is not None, f"{count} logprobs wanted, and no logits came back"
    best = _most_likely(logits, count)
    token_ids = np.concatenate([arrays.token_ids[index, :1], best])
    logprobs = logits[token_ids] - arrays.normalisers[index]
    return PositionLogprobs(token_ids.tolist(), logprobs.tolist(), rank)


def prompt_logprobs(
    result: StepResult, rows: Sequence[Request | None], spans: list[PromptSpan]
) -> dict[int, list[PositionLogprobs]]:
    """Return, by row, the logprobs of the prompt tokens in its span."""
    if not spans:
        return {}
    arrays = result.prompt_logprobs
    assert arrays is not None, f"no prompt logprobs came back for {len(spans)} rows"
    parts = {}
    for span in spans:
        request = rows[span.row]
        assert request is not None, span
        count = request.sampling_params.prompt_logprobs
        assert count is not None, rows[span.row]
        # A span of whom needs logits has one position, which is the row's last (see `limits`).
        logits = None if result.logits is None else result.logits[span.row]
        positions = range(span.start, span.end)
        parts[span.row] = [row_logprobs(arrays, index, count, logits) for index in positions]
    return parts


def _most_likely(logits: np.ndarray, count: int) -> np.ndarray:
    """The tokens with the largest logits, best first; of equals the first, as on the device."""
    least = np.partition(logits, -count)[-count]
    candidates = np.flatnonzero(logits >= least)
    order = np.argsort(-logits[candidates], kind="stable")
    return candidates[order[:count]]
