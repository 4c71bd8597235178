"""Bounds from plans for TPUs, at the chips' rates. They replace measurements, as there is no TPU.

    jaxllm plan --model config.json --tpu v6e-1 --max-model-len 2048 --context 1928 --json > 1.json
    python benchmarks/tpu_bounds.py 1.json 4.json ...

For each plan: what a full decode step and a full mixed step read, compute and exchange on a chip,
the least time of that, and the largest number of requests per second. The latter comes from
simulating the engine with steps of that time and a host that takes none. The output also has
published figures of other engines on such chips, and the bound from one request's arithmetic, which
a simulation cannot exceed.
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import msgspec

from jaxllm.programs.roofline import Roofline
from jaxllm.simulation.deployment import Deployment, read_plan
from jaxllm.simulation.simulator import simulate
from jaxllm.simulation.trace import make_trace

# Requests per second that vLLM's authors published for their engine (blog of 2025-10-16, a figure;
# 1800 tokens in, 128 out), for a Llama 3 by its number of layers and the slice.
PUBLISHED = {(32, "v6e-1"): 11.6, (80, "v6e-8"): 7.65}


@dataclasses.dataclass(frozen=True)
class Step:
    """A full step of one kind on a chip."""

    name: str
    gigabytes: float
    teraflops: float
    collectives: dict[str, tuple[int, int]]
    copies: int  # of whole weights or caches
    temp_mebibytes: float
    milliseconds: float
    limited_by: str


def steps_of(plan: dict[str, Any], line: Roofline) -> list[Step]:
    """The compiled steps, with bytes and operations of the roofline."""
    steps = []
    for program in plan["programs"]:
        kind, shape = program["name"].split()
        num_tokens, num_rows = map(int, shape.split("x"))
        num_bytes, num_flops = line.attention(num_tokens / num_rows, plan["context"])
        num_flops *= num_rows
        num_flops += line.flops_per_token * num_tokens + line.flops_per_row * num_rows
        steps.append(
            Step(
                name=f"{kind} {shape}",
                gigabytes=(line.bytes_per_step + num_rows * num_bytes) / 1e9,
                teraflops=num_flops / 1e12,
                collectives=program["collectives"],
                copies=len(program["whole_array_copies"]),
                temp_mebibytes=program["temp_bytes"] / 2**20,
                milliseconds=1e3 * program["bound"]["seconds"],
                limited_by=program["bound"]["limited_by"],
            )
        )
    return steps


def most_requests(
    deployment: Deployment, step_tokens: int, input_len: int, output_len: int, num_requests: int
) -> float:
    """Requests per second if all come at once, with at most this many tokens per step."""
    info = msgspec.structs.replace(deployment.info, max_num_batched_tokens=step_tokens)
    buckets = tuple(b for b in deployment.buckets if b.num_tokens <= step_tokens)
    trace = make_trace(
        num_requests,
        requests_per_second=math.inf,
        burstiness=1.0,
        input_len=input_len,
        output_len=output_len,
        spread=0.0,
        num_prefixes=0,
        prefix_len=0,
        seed=0,
    )
    outcome = simulate(
        trace,
        dataclasses.replace(deployment, info=info, buckets=buckets),
        num_replicas=1,
        enable_prefix_caching=False,
    )
    return num_requests / outcome.end


def arithmetic_alone(line: Roofline, input_len: int, output_len: int) -> float:
    """Requests per second if only the matrix products of their tokens took time."""
    num_tokens = input_len + output_len - 1  # the last token is not computed on
    num_flops = num_tokens * line.flops_per_token + output_len * line.flops_per_row
    return line.flops_per_second / num_flops


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plans", type=Path, nargs="+", help="outputs of `jaxllm plan --json`")
    parser.add_argument("--input-len", type=int, default=1800)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--num-requests", type=int, default=1000)
    args = parser.parse_args()
    for path in args.plans:
        for name, plan in json.loads(path.read_text()).items():
            if len(plan["stages"]) > 1:
                parser.error(f"{path}: {name} is a pipeline; this is for plans of one stage")
            show(path, name, plan, args.input_len, args.output_len, args.num_requests)


def show(
    path: Path, name: str, plan: dict[str, Any], input_len: int, output_len: int, num_requests: int
) -> None:
    (stage,) = plan["stages"]
    line = msgspec.convert(stage["roofline"], Roofline)
    weights, cache = stage["weights_bytes"] / 1e9, stage["kv_cache_bytes"] / 1e9
    print(f"\n{Path(plan['model']).name} on {name}: on each chip {weights:.2f} GB of weights and")
    print(f"{cache:.2f} GB of KV cache, for {plan['num_tokens']} tokens\n")
    print("| step | GB read | TFLOP | exchanged | whole copies | temp, MiB | least ms | limit |")
    print("|---|---|---|---|---|---|---|---|")
    for step in steps_of(plan, line):
        exchanged = ", ".join(
            f"{count} {opcode}: {size / 2**20:.1f} MiB"
            for opcode, (count, size) in step.collectives.items()
        )
        print(
            f"| {step.name} | {step.gigabytes:.2f} | {step.teraflops:.2f} "
            f"| {exchanged or 'nothing'} | {step.copies} | {step.temp_mebibytes:.0f} "
            f"| {step.milliseconds:.2f} | {step.limited_by} |"
        )
    deployment = read_plan(path, name=name, efficiency=1.0, launch_s=0.0, host_s_per_step=0.0)
    budgets = [b.num_tokens for b in deployment.buckets if b.num_tokens >= plan["max_num_seqs"]]
    most = {
        budget: most_requests(deployment, budget, input_len, output_len, num_requests)
        for budget in sorted(set(budgets))
    }
    print(f"\nbound, not a measurement, on requests/s of {input_len} in and {output_len} out, by")
    print(f"--max-num-batched-tokens: {', '.join(f'{b}: {x:.2f}' for b, x in most.items())}")
    print(f"arithmetic alone: {arithmetic_alone(line, input_len, output_len):.2f}")
    published = PUBLISHED.get((stage["num_layers"], name))
    if published and (input_len, output_len) == (1800, 128):
        best = max(most.values())
        print(f"published of vLLM: {published}, {published / best:.2f} of the highest bound")


if __name__ == "__main__":
    main()
