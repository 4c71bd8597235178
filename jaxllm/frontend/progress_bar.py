"""The progress bars of LLM."""

from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from jaxllm.outputs import AnyOutput, RequestOutput


class Bar:
    """A progress bar, or nothing if the user wants none."""

    def __init__(self, use_tqdm: bool | Callable[..., tqdm], **options: Any):
        make = tqdm if use_tqdm is True else use_tqdm
        self._bar = make(**options) if make else None

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class RequestBar(Bar):
    """A bar over requests, with the rates of input and output tokens."""

    def __init__(self, total: int, done: int, use_tqdm: bool | Callable[..., tqdm]):
        super().__init__(use_tqdm, total=total, initial=done, desc="Requests", unit="req")
        self._input_tokens = self._output_tokens = 0

    def update(self, output: AnyOutput) -> None:
        if self._bar is None:
            return
        self._input_tokens += len(output.prompt_token_ids)
        if isinstance(output, RequestOutput):
            self._output_tokens += sum(len(answer.token_ids) for answer in output.outputs)
        elapsed = max(self._bar.format_dict["elapsed"], 1e-9)
        self._bar.set_postfix_str(
            f"in {self._input_tokens / elapsed:.0f} tok/s, "
            f"out {self._output_tokens / elapsed:.0f} tok/s",
            refresh=False,
        )
        self.advance()
