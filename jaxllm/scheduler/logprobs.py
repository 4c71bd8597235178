"""Takes each request's logprobs out of the arrays that a step brought.

A step computes MAX_STEP_LOGPROBS for a position at most. Whoever wants more gets them made here, of
the position's logits: the cost is the request's own, and the step is no slower for the others.
"""

import numpy as np

from jaxllm.messages import PositionLogprobs
from jaxllm.sampling_params import MAX_STEP_LOGPROBS
from jaxllm.scheduler.schedule import LogprobArrays


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


def _most_likely(logits: np.ndarray, count: int) -> np.ndarray:
    """The tokens with the largest logits, best first; of equals the first, as on the device."""
    least = np.partition(logits, -count)[-count]
    candidates = np.flatnonzero(logits >= least)
    order = np.argsort(-logits[candidates], kind="stable")
    return candidates[order[:count]]
