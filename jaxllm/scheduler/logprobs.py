"""Takes each request's logprobs out of the arrays that a step brought."""

from jaxllm.messages import PositionLogprobs
from jaxllm.scheduler.draft import PromptSpan
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.schedule import LogprobArrays, StepResult


def row_logprobs(arrays: LogprobArrays, row: int, count: int) -> PositionLogprobs:
    """Return the logprobs at one position: of the token there, and of the `count` best ones.

    The arrays are as wide as the request that wants most; -1 takes all there is.
    """
    end = None if count < 0 else 1 + count
    return PositionLogprobs(
        arrays.token_ids[row, :end].tolist(),
        arrays.logprobs[row, :end].tolist(),
        int(arrays.ranks[row]),
    )


def prompt_logprobs(
    result: StepResult, rows: list[Request], spans: list[PromptSpan]
) -> dict[int, list[PositionLogprobs]]:
    """Return, by row, the logprobs of the prompt tokens in its span."""
    if not spans:
        return {}
    arrays = result.prompt_logprobs
    assert arrays is not None, f"no prompt logprobs came back for {len(spans)} rows"
    parts = {}
    for span in spans:
        count = rows[span.row].sampling_params.prompt_logprobs
        assert count is not None, rows[span.row]
        positions = range(span.start, span.end)
        parts[span.row] = [row_logprobs(arrays, position, count) for position in positions]
    return parts
