"""The least time that a step can take: what must be read, computed and sent, at the chip's rates.

Nothing is as fast, and nothing here says how much slower it is.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The least time that a step can take."""

    seconds: float
    limited_by: Literal["memory bandwidth", "arithmetic", "interconnect"]


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """What steps of one stage read, compute and send, on each of its devices.

    Every matrix is read once in a step, and what a row sees of its context. Each token is worth two
    operations per weight of a matrix, and four per attended token, query head and element of a
    head. While devices add up what each of them has, they do not compute, for the next matrix waits
    for the sum; but what they read can come meanwhile.
    """

    bytes_per_second: float
    flops_per_second: float
    bytes_per_step: float  # matrices
    flops_per_token: float  # matrices but for the head
    flops_per_row: float  # the head, which only sees a row's last token
    # Of one layer: bytes of a token in the cache, operations of a token for each it attends to.
    kv_bytes_per_token: float
    flops_per_attended: float
    # How many layers there are of each window; 0 stands for none.
    layers_by_window: tuple[tuple[int, int], ...]
    # To the other devices of the stage, where there are any and their links are known.
    sent_bytes_per_token: float = 0.0
    link_bytes_per_second: float = 0.0

    def attention(self, tokens: Any, contexts: Any) -> tuple[Any, Any]:
        """Bytes and operations of rows of so many tokens, which are the last of their contexts.
        Numbers, or arrays with an entry for each row."""
        attended = np.maximum(contexts - (tokens - 1) / 2, 1)  # in the mean over a row's tokens
        num_bytes = num_flops = 0.0
        for window, num_layers in self.layers_by_window:
            seen = np.minimum(contexts, window) if window else contexts
            num_bytes += num_layers * seen * self.kv_bytes_per_token
            each = np.minimum(attended, seen)
            num_flops += num_layers * each * tokens * self.flops_per_attended
        return num_bytes, num_flops

    def bound(self, num_tokens: float, num_rows: float, attention: tuple[float, float]) -> Bound:
        """Of a step with so many tokens in all, whose rows' attention takes so many bytes and
        operations."""
        num_bytes, num_flops = attention
        reading = (self.bytes_per_step + num_bytes) / self.bytes_per_second
        num_flops += self.flops_per_token * num_tokens + self.flops_per_row * num_rows
        computing = num_flops / self.flops_per_second
        sending = 0.0
        if self.link_bytes_per_second:
            sending = self.sent_bytes_per_token * num_tokens / self.link_bytes_per_second
        if reading >= computing + sending:
            return Bound(seconds=float(reading), limited_by="memory bandwidth")
        return Bound(
            seconds=float(computing + sending),
            limited_by="arithmetic" if computing >= sending else "interconnect",
        )
