"""What adapters cost on this machine: seconds of steps with them, over steps without, in one run.

    python benchmarks/adapters.py [--adapters 8] [--rank 16] [--requests 64] [--model MODEL]

Without --model it is a Llama of 0.35 billion random parameters. Two engines are in this process,
one with adapters and one without. They take turns, with the same requests, so that other load on
the machine affects all alike:

- plain: requests without adapters, in the engine without;
- beside: the same requests, in the engine with adapters;
- mixed: the same prompts, each with one of the adapters.

The medians of the rounds are compared. The ratio of CPU seconds tells what is left of it on a
machine that is in use.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import side_by_side
from side_by_side import SHAPE_350M

from jaxllm import LLM, LoRARequest, SamplingParams
from jaxllm.testing import make_tiny_adapter

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-native-kernels", action="store_true")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        side_by_side.checkpoint(args.model, args.dtype, **SHAPE_350M) as model,
    ):
        loras = [
            LoRARequest(
                f"adapter{number}",
                number,
                make_tiny_adapter(
                    Path(folder) / str(number),
                    model,
                    seed=number,
                    rank=args.rank,
                    target_modules=LAYERS,
                ),
            )
            for number in range(1, args.adapters + 1)
        ]
        print(json.dumps(vars(args) | measure(args, model, loras)))


def measure(args: argparse.Namespace, model: str, loras: list[LoRARequest]) -> dict[str, float]:
    options = {
        "dtype": args.dtype,
        "max_num_seqs": args.requests,
        "max_num_batched_tokens": max(args.requests, 512),
        "max_model_len": 512,
        "kv_cache_memory_bytes": 1 << 30,
        "enforce_eager": True,  # the first round compiles
        "native_kernels": not args.no_native_kernels,
    }
    adapters = {"enable_lora": True, "max_loras": len(loras), "max_lora_rank": args.rank}
    without, having = LLM(model, **options), LLM(model, **options, **adapters)
    # Different prompts, so that none finds a prefix of another.
    prompts = [
        [3 + (31 * number + place) % 1000 for place in range(args.prompt_tokens)]
        for number in range(args.requests)
    ]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    mixed = [loras[number % len(loras)] for number in range(args.requests)]
    ways = {"plain": (without, None), "beside": (having, None), "mixed": (having, mixed)}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):
        for name, (llm, lora) in ways.items():
            began, used = time.perf_counter(), time.process_time()
            llm.generate(prompts, params, lora_request=lora, use_tqdm=False)
            if number:
                wall[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - used)
    found = {"plain_s": statistics.median(wall["plain"])}
    for name in ("beside", "mixed"):
        found[f"{name}_over_plain"] = median_ratio(wall[name], wall["plain"])
        found[f"{name}_over_plain_cpu"] = median_ratio(cpu[name], cpu["plain"])
    return {name: round(value, 3) for name, value in found.items()}


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """The median over rounds, each with the other load of its time."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
