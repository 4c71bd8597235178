"""Common parts of chat and completion streams: they count tokens and report usage on request."""

from collections.abc import Callable, Iterable

from msgspec import UNSET, UnsetType

from jaxllm.openai.answer import CompletionTokensDetails, PromptTokensDetails, Usage
from jaxllm.openai.fields import StreamOptions
from jaxllm.outputs import RequestOutput


class UsageMeter:
    """Counts the tokens of a streamed answer."""

    def __init__(
        self,
        options: StreamOptions | None,
        nums_reasoning: Callable[[], Iterable[int | None]] = tuple,
    ):
        """`nums_reasoning` returns the number of reasoning tokens so far, for each answer."""
        self._nums_reasoning = nums_reasoning
        self._options = options or StreamOptions()
        self._prompts: dict[int, RequestOutput] = {}  # the first output for each prompt
        self._generated = 0

    def add(self, place: int, output: RequestOutput, *, hidden: bool = False) -> None:
        """Count an output.

        Args:
          hidden: whether the answer does not show its tokens.
        """
        self._prompts.setdefault(place, output)
        if not hidden:
            self._generated += sum(len(one.token_ids) for one in output.outputs)

    @property
    def of_chunk(self) -> Usage | None | UnsetType:
        """The usage in a chunk: unset if not requested, null if only the last chunk has it."""
        if self._options.continuous_usage_stats:
            return self._usage()
        return None if self._options.include_usage else UNSET

    @property
    def in_the_end(self) -> Usage | None:
        """The usage in a last chunk of its own; None if there is no such chunk."""
        return self._usage() if self._options.include_usage else None

    def _usage(self) -> Usage:
        prompt = sum(len(output.prompt_token_ids) for output in self._prompts.values())
        cached = sum(output.num_cached_tokens or 0 for output in self._prompts.values())
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._generated,
            total_tokens=prompt + self._generated,
            prompt_tokens_details=PromptTokensDetails(cached),
            completion_tokens_details=CompletionTokensDetails.of(self._nums_reasoning()),
        )
