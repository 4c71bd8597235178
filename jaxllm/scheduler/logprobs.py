"""Takes each request's logprobs out of the arrays of a step's result.

A step computes at most MAX_STEP_LOGPROBS for a position. For a request that wants more, this module
computes them from the position's logits: so the step is no slower for the other requests.
"""

import numpy as np

from jaxllm.messages import PositionLogprobs
from jaxllm.sampling_params import MAX_STEP_LOGPROBS
from jaxllm.scheduler.schedule import LogprobArrays


def row_logprobs(
    arrays: LogprobArrays, index: int, count: int, logits: np.ndarray | None = None
) -> PositionLogprobs:
    """Return the logprobs at one position: of the token there, and of the `count` best tokens.
    `logits`, [V], is needed only if `count` exceeds what a step computes."""
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
    """Return the tokens with the largest logits, best first. Among equal logits the smaller token
    id comes first, as on the device."""
    least = np.partition(logits, -count)[-count]
    candidates = np.flatnonzero(logits >= least)
    order = np.argsort(-logits[candidates], kind="stable")
    return candidates[order[:count]]
