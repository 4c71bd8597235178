"""Progress, speed and cost of a batch: a bar on a terminal, else lines in the log."""

import sys
import time

from tqdm import tqdm

from jaxllm.logging import init_logger
from jaxllm.plural import counted

logger = init_logger(__name__)

_LOG_EVERY_S = 60.0


class Progress:
    """Counts the work of this run. Progress is measured in bytes of the input, because the number
    of lines is known only at the end."""

    def __init__(self, input_bytes: int, price_per_hour: float | None):
        self.num_answers = self.num_errors = 0
        self.prompt_tokens = self.generated_tokens = 0
        self._input_bytes = input_bytes
        self._price_per_hour = price_per_hour
        self._bytes_before = self._bytes_done = 0
        self._bar: tqdm | None = None
        self._paid_since = self._started = self._logged = time.monotonic()

    def start(self) -> None:
        """Start the clock of the rates. The time to load the model does not count for rates, but
        for the cost."""
        self._started = self._logged = time.monotonic()
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=self._input_bytes,
                initial=self._bytes_before,
                bar_format="{percentage:3.0f}%|{bar:20}| {desc}",
            )

    def skip(self, num_bytes: int) -> None:
        """Count a line that an earlier run finished."""
        self._bytes_before += num_bytes
        self._advance(num_bytes)

    def answer(self, num_bytes: int, prompt_tokens: int, generated_tokens: int) -> None:
        self.num_answers += 1
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += generated_tokens
        self._bytes_done += num_bytes
        self._advance(num_bytes)

    def error(self, num_bytes: int) -> None:
        self.num_errors += 1
        self._bytes_done += num_bytes
        self._advance(num_bytes)

    def summary(self) -> str:
        """Describe the work of this run so far, in one line."""
        elapsed = max(time.monotonic() - self._started, 1e-9)
        parts = [
            counted(self.num_answers, "answer"),
            counted(self.num_errors, "error"),
            f"in {self.prompt_tokens / elapsed:.0f} tok/s",
            f"out {self.generated_tokens / elapsed:.0f} tok/s",
            _duration(elapsed),
        ]
        left_s = self._seconds_left(elapsed)
        if left_s >= 1:
            parts[-1] += f", {_duration(left_s)} left"
        if self._price_per_hour is not None:
            paid_s = time.monotonic() - self._paid_since
            parts.append(f"${paid_s / 3600 * self._price_per_hour:.2f}")
            if left_s >= 1:
                parts[-1] += f" of ${(paid_s + left_s) / 3600 * self._price_per_hour:.2f}"
        return ", ".join(parts)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _seconds_left(self, elapsed: float) -> float:
        left = self._input_bytes - self._bytes_before - self._bytes_done
        return elapsed * left / self._bytes_done if self._bytes_done else 0.0

    def _advance(self, num_bytes: int) -> None:
        if self._bar is not None:
            self._bar.set_description_str(self.summary(), refresh=False)
            self._bar.update(num_bytes)
        elif time.monotonic() - self._logged >= _LOG_EVERY_S:
            self._logged = time.monotonic()
            logger.info("batch: %s", self.summary())


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
