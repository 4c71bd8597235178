"""What all answers have in common: usage, and a look at whether there is an answer at all."""

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
        """Of the answers, each with its tokens of reasoning, or None where nobody has looked."""
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
      num_hidden: of the generated tokens, those that the answer does not show.
      nums_reasoning: of each answer, the tokens that are reasoning, if somebody has looked.
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


# The stop_reason of an answer that was ended for the time that it took: it is an answer, though.
TIMEOUT = "timeout"


def check_finished(outputs: Sequence[RequestOutput]) -> None:
    """Raise if one of the answers ended because of the engine and not by itself."""
    for output in outputs:
        for one in output.outputs:
            if one.finish_reason == "error":
                raise AnswerError(f"the engine could not finish the answer: {one.stop_reason}")
            if one.finish_reason == "abort" and one.stop_reason != TIMEOUT:
                raise AnswerError("the request was aborted before its answer was finished")
