"""The cost of a step on the host, with a device that answers at once.

Requests pass through a scheduler that runs one step ahead, as in the engine. Whenever one ends,
another arrives, so that a fixed number waits. The output is microseconds per step, for steps with
only decodes and for steps that also compute prompts. They should depend on the rows of a step. They
should not depend on the number of waiting requests, nor change from the first quarter of the steps
to the last, when many requests have finished.

    python benchmarks/step_host_time.py                     # 100,000 requests: some minutes
    python benchmarks/step_host_time.py --requests 5000 --waiting 100 2000 --json
"""

import argparse
import json
import random
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from jaxllm.cache_groups import CacheSizes, group_windows
from jaxllm.messages import EngineRequest
from jaxllm.metrics.stats import EngineStats
from jaxllm.plan.buckets import make_ladder
from jaxllm.prompt_logprobs import device, host
from jaxllm.runner.packer import StepPacker
from jaxllm.sampling.layout import LAYOUTS
from jaxllm.sampling_params import MAX_STEP_LOGPROBS, SamplingParams
from jaxllm.scheduler.kv.manager import KVCacheManager
from jaxllm.scheduler.schedule import Schedule, StepResult
from jaxllm.scheduler.scheduler import Scheduler

MIN_PROMPT, MAX_PROMPT = 1024, 8192


@dataclass
class Steps:
    """Nanoseconds of each part of each step; a part is a column of the table."""

    rows: list[int] = field(default_factory=list)
    only_decodes: list[bool] = field(default_factory=list)
    parts: dict[str, list[int]] = field(
        default_factory=lambda: {"schedule": [], "pack": [], "update": []}
    )

    def summary(self, num_running: int) -> list[dict]:
        rows, decodes = np.array(self.rows), np.array(self.only_decodes)
        quarter = len(rows) // 4
        early, late = np.arange(len(rows)) < quarter, np.arange(len(rows)) >= len(rows) - quarter
        full = rows >= 0.9 * num_running
        kinds = {
            "decode": decodes & full,
            "mixed": ~decodes & full,
            "mixed, first quarter": ~decodes & full & early,
            "mixed, last quarter": ~decodes & full & late,
            "all": np.ones(len(rows), bool),
        }
        return [self._line(kind, chosen) for kind, chosen in kinds.items() if chosen.any()]

    def _line(self, kind: str, chosen: np.ndarray) -> dict:
        columns = {name: np.array(times)[chosen] / 1e3 for name, times in self.parts.items()}
        columns["total"] = np.sum(list(columns.values()), axis=0)
        line = {"steps": kind, "count": int(chosen.sum())}
        line["rows"] = round(float(np.array(self.rows)[chosen].mean()), 1)
        for name, times in columns.items():
            line[f"{name}_us_mean"] = round(float(times.mean()), 1)
        line["total_us_p50"] = round(float(np.percentile(columns["total"], 50)), 1)
        line["total_us_p99"] = round(float(np.percentile(columns["total"], 99)), 1)
        return line


class Arrivals:
    """An endless stream of requests. There are few distinct prompts, to save memory. Each request
    has its own salt, so nothing is shared and every block is hashed."""

    def __init__(self, max_output: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._max_output = max_output
        self._num = 0
        self._prompts = [
            [self._random.randrange(150_000) for _ in range(length)]
            for length in range(MIN_PROMPT, MAX_PROMPT + 1, 112)
        ]

    def next(self) -> EngineRequest:
        self._num += 1
        max_tokens = self._random.randint(1, self._max_output)
        return EngineRequest(
            request_id=str(self._num),
            prompt_token_ids=self._random.choice(self._prompts),
            sampling_params=SamplingParams(max_tokens=max_tokens),
            max_tokens=max_tokens,
            seed=0,
            eos_token_ids=[151_643],
            cache_salt=str(self._num),
        )


def fake_device(schedule: Schedule) -> StepResult:
    """Answer at once, and never with an end-of-sequence token."""
    return StepResult(np.full(schedule.num_rows, 11, np.int32), None)


def measure(args: argparse.Namespace, num_waiting: int) -> dict:
    """Run all requests with this many of them waiting."""
    max_model_len = MAX_PROMPT + args.max_output
    sizes = CacheSizes(
        block_size=args.block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    windows = group_windows(args.windows)
    num_blocks = args.running * -(-max_model_len // args.block_size)
    stats = EngineStats()
    scheduler = Scheduler(
        max_num_seqs=args.running,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=max_model_len,
        kv=KVCacheManager(
            groups=sizes.divide(windows, num_blocks),
            block_size=args.block_size,
            enable_prefix_caching=not args.no_prefix_caching,
        ),
        features=(host.PromptLogprobs(),),
        stats=stats,
    )
    arrivals = Arrivals(args.max_output, args.seed)
    remaining = args.requests
    started = time.perf_counter()
    steps = Steps()
    schedule_ns, pack_ns, update_ns = steps.parts.values()
    packer = StepPacker(
        make_ladder(
            max_num_seqs=args.running,
            max_num_batched_tokens=args.max_num_batched_tokens,
            block_size=args.block_size,
            min_rows=1,
            num_cache_groups=len(windows),
        ),
        num_slots=args.running,
        num_cache_groups=len(windows),
        processors=(),
        features=[device.PromptLogprobs(MAX_STEP_LOGPROBS, LAYOUTS["cpu"])],
    )
    clock = time.thread_time_ns if args.cpu_time else time.perf_counter_ns
    in_flight: deque[tuple[Schedule, StepResult]] = deque()
    while True:
        while remaining and scheduler.num_waiting < num_waiting:
            scheduler.add_request(arrivals.next())
            remaining -= 1
        begin = clock()
        schedule = scheduler.schedule()
        planned = clock()
        if schedule is not None:
            in_flight.append((schedule, fake_device(schedule)))
            steps.rows.append(schedule.num_rows)
            steps.only_decodes.append(schedule.decode_only)
            schedule_ns.append(planned - begin)
            begin = clock()
            for admission in schedule.admissions:
                packer.admit(admission)
            packer.pack(schedule)
            pack_ns.append(clock() - begin)
        elif not in_flight:
            break
        if len(in_flight) > 1 or schedule is None:
            begin = clock()
            scheduler.update(*in_flight.popleft())
            update_ns.append(clock() - begin)
    assert len(schedule_ns) == len(pack_ns) == len(update_ns)
    return {
        "waiting": num_waiting,
        "requests": stats.num_requests_finished,
        "preemptions": stats.num_preemptions,
        "seconds": round(time.perf_counter() - started, 1),
        "lines": steps.summary(args.running),
    }


def show(result: dict) -> None:
    print(
        f"\n{result['waiting']} waiting, {result['requests']} requests in {result['seconds']} s, "
        f"{result['preemptions']} preemptions"
    )
    names = [name for name in result["lines"][0] if name != "steps"]
    print(f"{'steps':<22}" + "".join(f"{name:>18}" for name in names))
    for line in result["lines"]:
        print(f"{line['steps']:<22}" + "".join(f"{line[name]:>18}" for name in names))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--running", type=int, default=256, help="most requests at once")
    parser.add_argument("--waiting", type=int, nargs="+", default=[1_000, 50_000])
    parser.add_argument("--max-output", type=int, default=512, help="longest answer, in tokens")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--windows",
        type=lambda text: int(text) or None,
        nargs="+",
        default=[None],
        help="what layers see, 0 for all: each window is a cache group",
    )
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cpu-time", action="store_true", help="CPU time of the thread, for a busy machine"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = parser.parse_args()
    results = []
    for num_waiting in args.waiting:
        results.append(measure(args, num_waiting))
        if not args.json:
            show(results[-1])
    if args.json:
        print(json.dumps({"arguments": vars(args), "results": results}))


if __name__ == "__main__":
    main()
