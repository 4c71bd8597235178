import pytest

from jaxllm.cache_groups import CacheGroup
from jaxllm.messages import EngineInfo
from jaxllm.plan.buckets import make_ladder
from jaxllm.simulation.deployment import Deployment


class ConstantTime:
    """Every step takes the same time in every stage."""

    def __init__(self, seconds, num_stages=1):
        self.num_stages = num_stages
        self._seconds = [seconds] * num_stages

    def seconds(self, bucket, schedule):
        return self._seconds


@pytest.fixture
def deployment():
    """A function that makes a deployment whose steps all take the same time."""

    def make(*, host_s=0.0, num_stages=1, seconds=1.0, max_num_seqs=4, num_blocks=64):
        info = EngineInfo(
            model="model",
            model_dir="",
            vocab_size=1 << 31,
            max_model_len=256,
            max_logprobs=0,
            eos_token_ids=[],
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            cache_groups=(
                CacheGroup(window=None, num_blocks=num_blocks, max_blocks_per_request=16),
            ),
            block_size=16,
        )
        return Deployment(
            name="model",
            num_chips=1,
            info=info,
            buckets=make_ladder(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=64, block_size=16, min_rows=2
            ),
            step_time=ConstantTime(seconds, num_stages),
            host_s_per_step=host_s,
        )

    return make
