"""Corrupted rows: their logits are NaN or infinite, so there is no token to sample.

The causes are damaged weights and activations that overflow. A corrupted request ends with an
error. No other request may find the keys and values that it has left in the KV cache.

The scheduler learns of a corrupted row when its step comes back. Until then a request with the same
prefix may take over its blocks, and they corrupt that request: attention computes some tokens
together, so NaN may reach the keys and values of earlier tokens. A corrupted request that has taken
over blocks therefore starts over, once, with blocks of its own.
"""

import numpy as np

from jaxllm.scheduler.schedule import NO_TOKEN, Schedule, StepResult

CORRUPTED = (
    "the logits are not finite numbers: weights of the model may be damaged, its activations may "
    "overflow, or a logits processor may return NaN"
)


def corrupted_rows(schedule: Schedule, result: StepResult) -> set[int]:
    """Return the rows of a step that should have sampled a token and did not."""
    num_rows = schedule.num_rows
    is_bad = result.token_ids[:num_rows] == NO_TOKEN
    if schedule.num_drafts is not None and result.drafted is not None:
        more = result.drafted.token_ids[:num_rows]
        counts = np.arange(more.shape[1]) < result.drafted.num_accepted[:num_rows, None]
        is_bad = is_bad | ((more == NO_TOKEN) & counts).any(axis=1)
    return set(np.flatnonzero(is_bad & schedule.samples).tolist())
