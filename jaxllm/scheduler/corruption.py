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
    tokens = result.token_ids[: schedule.num_rows]
    return set(np.flatnonzero((tokens == NO_TOKEN) & schedule.samples).tolist())
