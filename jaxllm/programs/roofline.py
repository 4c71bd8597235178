"""The least time of a step: its bytes, operations and traffic at the chip's peak rates.

It is a bound. Real steps are slower, and this module does not say by how much.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The least time of a step, and its bottleneck."""

    seconds: float
    limited_by: Literal["memory bandwidth", "arithmetic", "interconnect"]


class Window(NamedTuple):
    """What layers with the same window read and compute, all together."""

    size: int  # 0: they see everything
    bytes_per_token: float  # of keys and values
    flops_per_attended: float  # per pair of attending tokens
    # Whole prompts of so many tokens may be computed otherwise (0: they are not).
    fewest_fresh: int = 0
    flops_per_fresh: float = 0.0


class ExpertLayers(NamedTuple):
    """The experts of layers in which a token chooses the same share of them."""

    num_bytes: float  # of all experts
    share: float  # that a token chooses

    def bytes_read(self, num_tokens: float) -> float:
        """The bytes of the experts that any of the tokens chooses, if all are equally likely. Real
        routers choose fewer."""
        return self.num_bytes * (1 - (1 - self.share) ** num_tokens)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """What steps of one stage read, compute and send on each device.

    A step reads every matrix once, of experts those that its tokens choose, and the context that
    each row sees. A token takes two operations per weight of a matrix, and four per attended token,
    query head and element of a head. Devices do not compute during an all-reduce, because the next
    matrix needs the sum. But they can read memory meanwhile.
    """

    bytes_per_second: float
    flops_per_second: float
    bytes_per_step: float  # matrices without experts
    flops_per_token: float  # matrices without the head; of experts those that a token chooses
    flops_per_row: float  # the head, which computes only a row's last token
    windows: tuple[Window, ...]
    state_bytes_per_row: float = 0.0  # of recurrent layers, whose operations are not counted
    experts: tuple[ExpertLayers, ...] = ()
    # To the other devices of the stage; zero if there are none or their links are unknown.
    sent_bytes_per_token: float = 0.0
    link_bytes_per_second: float = 0.0

    def attention(self, tokens: Any, contexts: Any) -> tuple[Any, Any]:
        """Bytes and operations of rows with `tokens` tokens at the end of `contexts`: numbers, or
        arrays with an entry for each row."""
        attended = np.maximum(contexts - (tokens - 1) / 2, 1)  # the mean over a row's tokens
        num_bytes, num_flops = self.state_bytes_per_row + 0.0 * contexts, 0.0
        for window in self.windows:
            seen = np.minimum(contexts, window.size) if window.size else contexts
            num_bytes += seen * window.bytes_per_token
            is_fresh = (tokens >= contexts) & (tokens >= (window.fewest_fresh or np.inf))
            per_pair = np.where(is_fresh, window.flops_per_fresh, window.flops_per_attended)
            num_flops += np.minimum(attended, seen) * tokens * per_pair
        return num_bytes, num_flops

    def bound(self, num_tokens: float, num_rows: float, attention: tuple[float, float]) -> Bound:
        """The bound of a step with these tokens and rows. `attention` has the bytes and operations
        of the rows' attention."""
        num_bytes, num_flops = attention
        num_bytes += sum(experts.bytes_read(num_tokens) for experts in self.experts)
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
