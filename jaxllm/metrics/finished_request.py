"""The record of a finished request, for metrics and traces."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxllm.outputs import RequestStateStats
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A request that has ended, for whatever reason."""

    request_id: str
    params: SamplingParams | PoolingParams
    trace_headers: Mapping[str, str] | None
    num_prompt_tokens: int
    num_cached_tokens: int
    # One entry for each answer.
    num_generation_tokens: list[int]
    finish_reasons: list[str]
    errors: list[str]  # the engine's messages for the answers that failed
    times: RequestStateStats
    end_time: float  # on time.time(), as is the arrival

    @property
    def queue_s(self) -> float:
        """Time from queueing to scheduling."""
        return max(self.times.scheduled_ts - self.times.queued_ts, 0.0)

    @property
    def prefill_s(self) -> float:
        """Time from scheduling to the first token."""
        return max(self.times.first_token_ts - self.times.scheduled_ts, 0.0)

    @property
    def decode_s(self) -> float:
        """Time from the first token to the last."""
        return max(self.times.last_token_ts - self.times.first_token_ts, 0.0)

    @property
    def inference_s(self) -> float:
        """Time from scheduling to the last token."""
        return max(self.times.last_token_ts - self.times.scheduled_ts, 0.0)

    @property
    def e2e_s(self) -> float:
        """Time from the arrival to the end."""
        return max(self.end_time - self.times.arrival_time, 0.0)
