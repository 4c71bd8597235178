"""Common parts of all answers: usage, and the check that the engine finished the answer."""

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.openai.errors import AnswerError
from jaxllm.outputs import RequestOutput


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int

    @classmethod
    def of(cls, nums: Iterable[int | None]) -> "CompletionTokensDetails | UnsetType":
        """Sum over the answers; None stands for an answer without a count."""
        known = [num for num in nums if num is not None]
        return cls(sum(known)) if known else UNSET


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def usage_of(
    outputs: Sequence[RequestOutput],
    *,
    num_hidden: int = 0,
    nums_reasoning: Iterable[int | None] = (),
) -> Usage:
    """Count tokens; a prompt counts once, however many answers it has.

    Args:
      num_hidden: number of generated tokens that the answer does not show.
      nums_reasoning: number of reasoning tokens of each answer; None if they were not counted.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(one.token_ids) for output in outputs for one in output.outputs) - num_hidden
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptTokensDetails(
            sum(output.num_cached_tokens or 0 for output in outputs)
        ),
        completion_tokens_details=CompletionTokensDetails.of(nums_reasoning),
    )


# The stop_reason of an answer that exceeded its time limit. Its finish_reason is "abort", but it is
# a valid answer.
TIMEOUT = "timeout"


def check_finished(outputs: Sequence[RequestOutput]) -> None:
    """Raise if the engine failed or aborted one of the answers."""
    for output in outputs:
        for one in output.outputs:
            if one.finish_reason == "error":
                raise AnswerError(f"the engine could not finish the answer: {one.stop_reason}")
            if one.finish_reason == "abort" and one.stop_reason != TIMEOUT:
                raise AnswerError("the request was aborted before its answer was finished")
