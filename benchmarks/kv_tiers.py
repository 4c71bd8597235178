"""What a second home for KV blocks brings: tokens computed again, throughput, and the first token
after a restart, in one run.

    python benchmarks/kv_tiers.py [--requests 64] [--rounds 3] [--model MODEL] [--dtype bfloat16]

Without --model it is a Llama of 21 million random parameters. Three engines are in this process and
take turns with the same mixed requests, so that other load on the machine affects all alike:

- room: its cache has room for all running requests;
- quarter: its cache has a quarter of these blocks;
- tier: so has this one, and a second home.

Then an engine with files of blocks starts over, and answers a long prompt: cold, without files, and
warm, with those that the engine before has left. At last one engine computes long prompts and hands
them over to another, which answers.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import side_by_side

from jaxllm import LLM, SamplingParams

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
}
BLOCK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long-prompt", type=int, default=1500)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        side_by_side.checkpoint(args.model, args.dtype, **SHAPE) as model,
    ):
        print(json.dumps(under_pressure(model, args)), flush=True)
        print(json.dumps(after_a_restart(model, args, Path(folder))), flush=True)
        print(json.dumps(handed_over(model, args, Path(folder))), flush=True)


def under_pressure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(0)
    prompts = [
        [rng.randrange(3, 8000) for _ in range(rng.randrange(32, 257))]
        for _ in range(args.requests)
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=rng.randrange(16, 97), ignore_eos=True)
        for _ in prompts
    ]
    room = args.rows * (256 + 96) // BLOCK
    options = {
        "max_model_len": 384,
        "max_num_seqs": args.rows,
        "max_num_batched_tokens": 128,
        "block_size": BLOCK,
        "dtype": args.dtype,
        "skip_tokenizer_init": True,
    }
    engines = {
        "room": LLM(model, num_gpu_blocks_override=room, **options),
        "quarter": LLM(model, num_gpu_blocks_override=room // 4, **options),
        "tier": LLM(model, num_gpu_blocks_override=room // 4, kv_offloading_size=0.25, **options),
    }
    least = sum(map(len, prompts)) + sum(its.max_tokens - 1 for its in params)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in engines}
    figures: dict[str, Any] = {}
    answers = {}
    for _ in range(args.rounds):
        for name, llm in engines.items():
            llm.reset_prefix_cache()
            before = llm.llm_engine.stats()
            start, cpu = time.perf_counter(), time.process_time()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds[name].append(time.perf_counter() - start)
            cpu_seconds[name].append(time.process_time() - cpu)
            after = llm.llm_engine.stats()
            answers[name] = [output.outputs[0].token_ids for output in outputs]
            figures[name] = {
                "tokens_computed_again": after.num_scheduled_tokens
                - before.num_scheduled_tokens
                - least,
                "preemptions": after.num_preemptions - before.num_preemptions,
                "blocks_stored": after.host_blocks_stored - before.host_blocks_stored,
                "blocks_loaded": after.host_blocks_loaded - before.host_blocks_loaded,
                "blocks_dropped": after.host_blocks_dropped - before.host_blocks_dropped,
            }
    for name in engines:
        figures[name]["median_s"] = round(statistics.median(seconds[name]), 3)
        figures[name]["median_cpu_s"] = round(statistics.median(cpu_seconds[name]), 3)
        figures[name]["same_tokens_as_room"] = answers[name] == answers["room"]
    for llm in engines.values():
        llm.llm_engine.shutdown()
    ratio = figures["quarter"]["median_s"] / figures["tier"]["median_s"]
    return {"least_tokens": least, **figures, "throughput_tier_over_quarter": round(ratio, 3)}


def after_a_restart(model: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rng = random.Random(1)
    prompt = [rng.randrange(3, 8000) for _ in range(args.long_prompt)]
    other = [rng.randrange(3, 8000) for _ in range(args.long_prompt)]
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    found = 0
    for number in range(args.rounds):
        for its in seconds.values():
            llm = LLM(
                model,
                max_model_len=args.long_prompt + 64,
                max_num_seqs=4,
                max_num_batched_tokens=128,
                block_size=BLOCK,
                num_gpu_blocks_override=2 * (args.long_prompt + 64) // BLOCK,
                dtype=args.dtype,
                skip_tokenizer_init=True,
                kv_offloading_size=0.25,
                kv_offloading_path=str(folder / str(number)),
            )
            one = SamplingParams(temperature=0, max_tokens=1)
            llm.generate([other[:64]], one, use_tqdm=False)  # not the first request of a process
            start = time.perf_counter()
            llm.generate([prompt], one, use_tqdm=False)
            its.append(time.perf_counter() - start)
            found = llm.llm_engine.stats().external_cache_hits
            llm.llm_engine.shutdown()
    medians = {f"{name}_first_token_s": statistics.median(its) for name, its in seconds.items()}
    return {
        "prompt_tokens": args.long_prompt,
        "tokens_found_warm": found,
        **{name: round(value, 4) for name, value in medians.items()},
    }


def handed_over(model: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The first token of an engine that computes a prompt, and of one that takes it over."""
    rng = random.Random(2)
    secret = folder / "secret"
    secret.write_text("a secret of this benchmark")
    giver, taker = (
        LLM(
            model,
            max_model_len=args.long_prompt + 64,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            block_size=BLOCK,
            num_gpu_blocks_override=2 * (args.long_prompt + 64) // BLOCK,
            dtype=args.dtype,
            skip_tokenizer_init=True,
            kv_offloading_size=0.25,
            kv_role=role,
            kv_secret_file=str(secret),
        )
        for role in ("kv_producer", "kv_consumer")
    )
    seconds: dict[str, list[float]] = {"computes": [], "takes_over": []}
    for _ in range(args.rounds + 1):
        prompt = [rng.randrange(3, 8000) for _ in range(args.long_prompt)]
        transfer: dict[str, Any] | None = {"do_remote_decode": True}
        for llm, its in zip((giver, taker), seconds.values(), strict=True):
            params = SamplingParams(
                temperature=0, max_tokens=1, extra_args={"kv_transfer_params": transfer}
            )
            start = time.perf_counter()
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            its.append(time.perf_counter() - start)
            transfer = output.kv_transfer_params
    stats = taker.llm_engine.stats()
    for llm in (taker, giver):
        llm.llm_engine.shutdown()
    # Without the first round, which is the first request of both.
    medians = {name: statistics.median(its[1:]) for name, its in seconds.items()}
    return {
        "prompt_tokens": args.long_prompt,
        "blocks_taken": stats.blocks_taken,
        "blocks_missed": stats.blocks_not_taken,
        **{f"{name}_first_token_s": round(value, 4) for name, value in medians.items()},
    }


if __name__ == "__main__":
    main()
