"""Corrupted rows: their logits are NaN or infinite, so that there is no token to sample.

Damaged weights are a cause, and activations that overflow. Such a request ends with an error, and
no other request may find the keys and values that it has left in the KV cache.

The scheduler learns of a corrupted row when its step comes back. Until then a request whose prompt
begins alike may take over its blocks, and is corrupted by them: attention computes some tokens
together, so NaN may reach keys and values of earlier tokens. A corrupted request that has taken
over blocks therefore starts over, once, with blocks of its own.
"""

from collections.abc import Sequence

import numpy as np

from jaxllm.scheduler.draft import PromptSpan
from jaxllm.scheduler.schedule import NO_TOKEN, Schedule, StepResult

CORRUPTED = (
    "the logits are not finite numbers: weights of the model may be damaged, its activations may "
    "overflow, or a logits processor may return NaN"
)


def corrupted_rows(
    schedule: Schedule, result: StepResult, spans: Sequence[PromptSpan]
) -> frozenset[int]:
    """Return the rows of a step that sampled nothing, or that brought logprobs of their prompt
    which are no numbers."""
    tokens = result.token_ids[: schedule.num_rows]
    rows = np.flatnonzero((tokens == NO_TOKEN) & schedule.samples).tolist()
    if spans:
        assert result.prompt_logprobs is not None, f"{len(spans)} rows want prompt logprobs"
        of_targets = result.prompt_logprobs.logprobs[:, 0]
        rows += [s.row for s in spans if not np.isfinite(of_targets[s.start : s.end]).all()]
    return frozenset(rows)
