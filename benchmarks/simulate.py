"""The error of a simulation: the same trace through the engine and through its simulation.

    python benchmarks/simulate.py MODEL
    python benchmarks/simulate.py MODEL --load 0.5 0.8 --requests 300 --json

First the engine's steps are timed, as by `jaxllm measure-steps`. Then requests with random lengths
come at random times, and both serve them. The rate is a share of the simulation's maximum. Times of
the engine are from its own clock, like those of the simulation. The machine should be idle
otherwise: a disturbance of the engine does not affect the simulation.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from jaxllm import LLM, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.metrics.stats import EngineStats
from jaxllm.simulation.deployment import Deployment, read_measurement
from jaxllm.simulation.measure import measure_steps
from jaxllm.simulation.report import Summary, summarize
from jaxllm.simulation.simulator import Outcome, simulate
from jaxllm.simulation.trace import Trace, make_trace


def serve(llm: LLM, trace: Trace, run: int) -> Outcome:
    """Serve the trace's requests by a real engine at their times; each run has other tokens."""
    engine = llm.llm_engine
    arrivals, num_arrived = trace.arrivals.tolist(), 0
    first, last = np.full(len(trace), np.nan), np.full(len(trace), np.nan)
    start = time.perf_counter()
    while num_arrived < len(trace) or engine.has_unfinished_requests():
        now = time.perf_counter() - start
        while num_arrived < len(trace) and arrivals[num_arrived] <= now:
            request = trace.request(num_arrived, llm.llm_engine.info.max_model_len)
            assert request is not None
            rng = np.random.default_rng([run, num_arrived])
            prompt = rng.integers(3, 250, len(request.prompt_token_ids)).tolist()
            params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, temperature=0)
            engine.add_request(str(num_arrived), {"prompt_token_ids": prompt}, params)
            num_arrived += 1
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, arrivals[num_arrived] - (time.perf_counter() - start)))
            continue
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            index = int(output.request_id)
            if np.isnan(first[index]):
                first[index] = now
            if output.finished:
                last[index] = now
    return Outcome(
        first_token_at=first,
        finished_at=last,
        num_output_tokens=trace.num_output_tokens.astype(np.int64),
        stats=EngineStats(),
        end=float(last.max()),
        kv_cache_usage_mean=0.0,
        kv_cache_usage_max=0.0,
        busy_share=0.0,
    )


def compare(
    llm: LLM, deployment: Deployment, trace: Trace, repetitions: int
) -> dict[str, dict[str, float]]:
    """Metric -> the engine's value, the simulated value, and their ratio."""

    def figures(outcome: Outcome) -> dict[str, float]:
        summary: Summary = summarize(
            trace,
            outcome,
            num_replicas=1,
            chips_per_replica=1,
            goals_ms={},
            price_per_chip_hour=None,
        )
        return {
            "output tokens/s": summary.output_throughput,
            **{
                f"{name} {key}, ms": times[key]
                for name, times in (
                    ("first token", summary.ttft_ms),
                    ("per token", summary.tpot_ms),
                    ("answer", summary.e2el_ms),
                )
                for key in ("mean", "p50", "p99")
            },
        }

    runs = [figures(serve(llm, trace, run)) for run in range(1, repetitions + 1)]
    real = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    simulated = figures(simulate(trace, deployment, 1))
    return {
        name: {"engine": real[name], "simulated": simulated[name], "ratio": simulated[name] / value}
        for name, value in real.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--load", type=float, nargs="+", default=[0.4, 0.8], metavar="SHARE")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=3, help="of the engine")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = parser.parse_args()

    options = {"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    config = EngineConfig.create(args.model, **options)
    file = Path(tempfile.mkdtemp()) / "times.json"
    file.write_bytes(msgspec.json.encode(measure_steps(config, repetitions=3)))
    deployment = read_measurement(file)
    llm = LLM(args.model, **options)

    traffic = {
        "burstiness": 1.0,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "spread": 0.5,
        "num_prefixes": 0,
        "prefix_len": 0,
    }
    at_once = make_trace(args.requests, requests_per_second=math.inf, seed=0, **traffic)
    serve(llm, at_once.head(16), run=0)  # warm up
    most = args.requests / simulate(at_once, deployment, 1).end
    results = {"saturated": compare(llm, deployment, at_once, args.repetitions)}
    for load in args.load:
        trace = make_trace(args.requests, requests_per_second=load * most, seed=1, **traffic)
        results[f"{load:.0%} of {most:.1f} requests/s"] = compare(
            llm, deployment, trace, args.repetitions
        )
    if args.json:
        print(json.dumps(results, indent=1))
        return
    print(f"host {1e6 * deployment.host_s_per_step:.0f} us per step")
    for name, figures in results.items():
        print(f"\n{name:<28}{'engine':>12}{'simulated':>12}{'ratio':>8}")
        for figure, line in figures.items():
            print(f"{figure:<28}{line['engine']:>12.2f}{line['simulated']:>12.2f}", end="")
            print(f"{line['ratio']:>8.2f}")


if __name__ == "__main__":
    main()
