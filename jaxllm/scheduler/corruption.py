"""Corrupted rows: their logits are NaN or infinite, so that there is no token to sample.

Damaged weights are a cause, and activations that overflow. Such a request ends with an error, and
no other request may find the keys and values that it has left in the KV cache.

The scheduler learns of a corrupted row when its step comes back. Until then a request whose prompt
begins alike may take over its blocks, and is corrupted by them: attention computes some tokens
together, so NaN may reach keys and values of earlier tokens. A corrupted request that has taken
over blocks therefore starts over, once, with blocks of its own.
"""

import numpy as np

from jaxllm.scheduler.schedule import NO_TOKEN, Schedule, StepResult

CORRUPTED = (
    "the logits are not finite numbers: weights of the model may be damaged, its activations may "
    "overflow, or a logits processor may return NaN"
)


def corrupted_rows(schedule: Schedule, result: StepResult) -> set[int]:
    """Return the rows of a step that should have sampled a token, and have not."""
    tokens = result.token_ids[: schedule.num_rows]
    return set(np.flatnonzero((tokens == NO_TOKEN) & schedule.samples).tolist())
