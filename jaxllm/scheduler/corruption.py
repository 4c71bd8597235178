"""Rows whose numbers are none: NaN, or infinite, where the model computes probabilities.

Damaged weights do that, and activations that overflow. There is no answer to give then, and nothing
that the row has left in the KV cache may be shared with others.

That is known when the step comes back. Until then others may take over its blocks, because their
prompts begin alike, and are corrupted with it: attention computes some tokens together, so NaN may
reach keys and values of earlier ones. So a corrupted request that has taken over blocks starts over
with blocks of its own, once.
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
