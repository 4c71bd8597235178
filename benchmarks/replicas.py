"""How much replicas in one process slow each other down.

    python benchmarks/replicas.py

The engine is real except for its devices. These take the time that a step might take on an
accelerator, and compute nothing. Prompts and answers have many lengths, so that at any moment some
replicas have a long step and others a short one. First one replica serves its share of the requests
alone, then several serve theirs together. The ideal speed-up is the number of replicas.
"""

import argparse
import random
import time

import numpy as np
import side_by_side

from jaxllm import SamplingParams
from jaxllm.cache_groups import CacheGroup
from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.engine.replicas import Replicas
from jaxllm.messages import EngineInfo, EngineRequest
from jaxllm.metrics.startup import Phase
from jaxllm.scheduler.schedule import Schedule, StepResult

INFO = EngineInfo(
    model="model",
    model_dir="",
    vocab_size=32000,
    max_model_len=4096,
    max_logprobs=0,
    eos_token_ids=[],
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    cache_groups=(CacheGroup(window=None, num_blocks=4096, max_blocks_per_request=128),),
    block_size=32,
)
# About the times of a model of 8 billion parameters on a chip that reads the weights in 8 ms.
READ_S, TOKEN_S = 0.008, 45e-6


class TimedDevice:
    """Runs one step after the other; the number of tokens determines a step's time."""

    info = INFO
    num_token_rows = num_compiles_after_warmup = 0
    pack_s = 0.0

    def __init__(self) -> None:
        self.startup: list[Phase] = []
        self._free_at = 0.0

    def execute(self, schedule: Schedule) -> "TimedStep":
        begin = max(self._free_at, time.perf_counter())
        self._free_at = begin + READ_S + TOKEN_S * schedule.total_tokens
        return TimedStep(self._free_at, schedule.num_rows)

    def shutdown(self) -> None: ...


class TimedStep:
    def __init__(self, done_at: float, num_rows: int):
        self._done_at = done_at
        self._num_rows = num_rows

    def is_ready(self) -> bool:
        return time.perf_counter() >= self._done_at

    def result(self) -> StepResult:
        time.sleep(max(0.0, self._done_at - time.perf_counter()))
        return StepResult(np.full(self._num_rows, 11, np.int32), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", default="2,8", help="how many there are in a process")
    parser.add_argument("--requests", type=int, default=120, help="of each replica")
    side_by_side.add_out_argument(parser)
    args = parser.parse_args()
    rows = []
    for num in [1, *side_by_side.numbers(args.replicas)]:
        row = {"replicas": num, **served(num, num * args.requests)}
        row["share"] = row["tokens_per_s"] / (num * (rows[0] if rows else row)["tokens_per_s"])
        rows.append(row)
        print(
            "  ".join(
                f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
            )
        )
    side_by_side.record("replicas", rows, args)


def served(num_replicas: int, num_requests: int) -> dict[str, float]:
    """Answer this many requests, which are all there from the beginning."""
    config = EngineConfig.create("model", max_model_len=INFO.max_model_len)
    engine = Replicas([EngineCore(config, TimedDevice()) for _ in range(num_replicas)])
    lengths = random.Random(0)
    for i in range(num_requests):
        prompt = [i % 1000] * lengths.randrange(200, 3000)
        engine.add_request(
            EngineRequest(
                request_id=str(i),
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(),
                max_tokens=lengths.randrange(100, 700),
                seed=0,
            )
        )
    start, cpu, num_tokens = time.perf_counter(), time.process_time(), 0
    while engine.has_work():
        num_tokens += sum(len(output.new_token_ids) for output in engine.step())
    seconds = time.perf_counter() - start
    return {
        "tokens_per_s": num_tokens / seconds,
        "host_share": (time.process_time() - cpu) / seconds,  # of a core
    }


if __name__ == "__main__":
    main()
