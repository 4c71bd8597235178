"""All measurements on an H200 in one command: decodes, prompts, saturated throughput, and vLLM's.

    python benchmarks/h200.py --out FILE
    python benchmarks/h200.py --out FILE --vllm-python PATH --only decode,decode-vllm --profile DIR
    python benchmarks/h200.py --out FILE --shape tiny             (on any machine, to try it)

The model has the shape of Llama-3.1-8B and dummy weights. Each measurement is another benchmark in
its own process with a time limit, so a failure or a hang does not affect the others. Its record is
written to the file at once. A second call with the same file runs only the measurements that the
file lacks for this commit. Measurements that do not fit the time budget are skipped, and the output
says so; so the most important come first. The engines use the GPU one after the other, because one
cannot wait while another has the memory. They have the same limits.

At the end the command compares everything in the file: shares of the floors (see floors.py), and
the ratio to vLLM.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import side_by_side
from side_by_side import ROOT

LEAST_S = 20  # with less time left, no measurement starts


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, and the load for it."""

    config: dict[str, Any]
    limits: tuple[str, ...]  # of the engines
    ceilings: str  # measured bytes and operations per second of the device
    batches: str
    context: int
    prompt: int
    saturated: str  # requests, tokens of a prompt, tokens of an answer
    output_len: int  # of the requests with timed decodes


_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SHAPES = {
    "llama-3.1-8b": Shape(
        config=_LLAMA
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
        },
        # 256 requests of 2000 tokens take 67 GB.
        limits=(
            "--max-model-len=8448",
            "--max-num-seqs=256",
            "--max-num-batched-tokens=8192",
            "--kv-cache-memory-bytes=80000000000",
        ),
        ceilings="4.3e12,790e12",
        batches="1,64",
        context=1024,
        prompt=8192,
        saturated="512x1000x1000",
        output_len=128,
    ),
    # To try the script. Its shares have no meaning.
    "tiny": Shape(
        config=_LLAMA
        | {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 384,
            "max_position_embeddings": 2048,
        },
        limits=(
            "--max-model-len=512",
            "--max-num-seqs=8",
            "--max-num-batched-tokens=128",
            "--kv-cache-memory-bytes=16777216",
        ),
        ceilings="1e10,1e11",
        batches="1,8",
        context=64,
        prompt=128,
        saturated="16x32x16",
        output_len=48,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A benchmark and its arguments."""

    name: str
    script: str
    arguments: tuple[str, ...]
    minutes: float  # time limit


def measurements(shape: Shape, args: argparse.Namespace) -> Iterator[Measurement]:
    """All measurements, most important first."""
    yield Measurement(
        name="device",
        script="step_device_time",
        arguments=_device(shape),
        minutes=6,
    )
    # This one compiles all programs for the others. If it reaches its limit, the compiled programs
    # are kept, and the next measurement continues.
    one_token = (f"--contexts={shape.context}", "--output-len=1", "--repetitions=1", "--peers=")
    yield Measurement(
        name="start-up", script="latency", arguments=("--batches=1", *one_token), minutes=8
    )
    decode = (f"--batches={shape.batches}", f"--contexts={shape.context}")
    prefill = ("--batches=1", f"--contexts={shape.prompt}", "--output-len=1", "--repetitions=5")
    saturated = (f"--scenarios={shape.saturated}", "--repetitions=1")
    for name, script, arguments in (
        ("decode", "latency", (*decode, f"--output-len={shape.output_len}")),
        ("saturated", "offline", saturated),
        ("prefill", "latency", prefill),
    ):
        yield Measurement(name=name, script=script, arguments=(*arguments, "--peers="), minutes=6)
        if args.vllm_python:
            vllm = ("--peers=vllm", "--without-jaxllm", f"--vllm-python={args.vllm_python}")
            yield Measurement(
                name=f"{name}-vllm", script=script, arguments=(*arguments, *vllm), minutes=6
            )
    if args.profile:
        yield Measurement(
            name="profile",
            script="step_device_time",
            arguments=(*_device(shape), "--repetitions=1", f"--profile={args.profile}"),
            minutes=4,
        )


def _device(shape: Shape) -> tuple[str, ...]:
    return (
        f"--batches={shape.batches}",
        f"--context={shape.context}",
        f"--prompts={shape.prompt}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="FILE", required=True, help="records, a line of JSON each")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--minutes", type=float, default=18, help="for all together")
    parser.add_argument("--only", default="", help="names of measurements, comma-separated")
    parser.add_argument("--list", action="store_true", help="say their names, and run nothing")
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter that has vllm")
    parser.add_argument("--profile", metavar="DIR", help="keep traces of some steps there")
    parser.add_argument(
        "--commit", default=side_by_side.commit(), help="of this code, where its history is not"
    )
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    shape = SHAPES[args.shape]
    known = list(measurements(shape, args))
    names = args.only.split(",") if args.only else [one.name for one in known]
    if unknown := set(names) - {one.name for one in known}:
        # Measurements of vLLM need its interpreter.
        parser.error(f"--only {','.join(sorted(unknown))}: there are {[one.name for one in known]}")
    if args.list:
        print("\n".join(one.name for one in known))
        return
    chosen = [one for one in known if one.name in names]
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(shape.config))
        for measurement in chosen:
            label = f"{args.shape} {measurement.name} {args.commit}"
            left = end - time.monotonic()
            if label in records(args.out):
                _say(measurement.name, f"is in {args.out}")
            elif left < LEAST_S:
                _say(measurement.name, "dropped, the minutes are over")
            else:
                limit = min(left, 60 * measurement.minutes)
                _say(measurement.name, _run(measurement, shape, model, label, limit, args.out))
    show(shape, args)


def _say(name: str, outcome: str) -> None:
    print(f"== {name}: {outcome}", flush=True)


def _run(
    measurement: Measurement, shape: Shape, model: str, label: str, limit: float, out: str
) -> str:
    """Run a measurement in a process group, which is killed at its end."""
    _say(measurement.name, f"begins, with {limit:.0f} s at most")
    start = time.monotonic()
    process = subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "benchmarks" / f"{measurement.script}.py"),
            f"--model={model}",
            "--load-format=dummy",
            f"--ceilings={shape.ceilings}",
            *shape.limits,
            *measurement.arguments,
            f"--label={label}",
            f"--out={out}",
        ],
        env=_environment(profiles=measurement.name == "profile"),
        start_new_session=True,
    )
    try:
        status = process.wait(limit)
        outcome = "done" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        outcome = "ended at its limit"
    finally:
        for ending in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, ending)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
    return f"{outcome} after {time.monotonic() - start:.0f} s"


def _environment(*, profiles: bool) -> dict[str, str]:
    path = os.pathsep.join(
        filter(None, [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH")])
    )
    environment = os.environ | {"PYTHONPATH": path}
    if profiles and shutil.which("nvidia-smi"):
        # Otherwise XLA launches each kernel separately under the profiler.
        flags = os.environ.get("XLA_FLAGS", "")
        flags += " --xla_enable_command_buffers_during_profiling=true"
        environment["XLA_FLAGS"] = flags.strip()
    return environment


def records(out: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of the file, by label."""
    rows = {}
    with contextlib.suppress(FileNotFoundError):
        for line in Path(out).read_text().splitlines():
            record = json.loads(line)
            if "label" in record:
                rows[record["label"]] = record["rows"]
    return rows


def show(shape: Shape, args: argparse.Namespace) -> None:
    """Print a table of the file's records for this shape and commit."""
    found = records(args.out)

    def rows(name: str) -> list[dict[str, Any]]:
        return found.get(f"{args.shape} {name} {args.commit}", [])

    def line(what: str, *cells: str) -> None:
        print(f"{what:<44}" + "".join(f"{cell:>16}" for cell in cells))

    print(f"\n{args.shape}, {args.commit}, {side_by_side.hardware()}")
    line("", "jaxllm", "of the floor", "vLLM", "vLLM's/ours")
    for name in ("start-up", "decode"):
        for row in rows(name)[:1]:
            what = "compiled" if name == "start-up" else "found"
            line(f"start-up, programs {what}: s", f"{row['start_up_s']:.1f}")
    on_device = {row.get("batch", row["what"]): row for row in rows("device")}
    for row in on_device.values():
        what = f"decode, {row['batch']} x {row['context']}" if "batch" in row else "prefill"
        line(f"{what}: device, ms", f"{row['ms']:.3f}", f"{row['share']:.3f}")
    for name, figure in (("decode", "per_token_ms"), ("prefill", "first_token_ms")):
        theirs = {row["batch"]: row for row in rows(f"{name}-vllm")}
        for row in rows(name):
            batch, ours = row["batch"], row[figure]
            what = f"{name}, {batch} x {row['context']}: served, ms"
            line(
                what,
                f"{ours:.3f}",
                f"{row['share']:.3f}",
                *_beside(theirs.get(batch), figure, ours),
            )
            if name == "decode" and batch in on_device:
                line(f"decode, {batch}: device busy", f"{on_device[batch]['ms'] / ours:.3f}")
    theirs_at_once = rows("saturated-vllm")
    for row in rows("saturated"):
        line(
            f"saturated, {shape.saturated}: tokens/s",
            f"{row['tokens_per_s']:.0f}",
            f"{row['share']:.3f}",
            *_beside(next(iter(theirs_at_once), None), "tokens_per_s", row["tokens_per_s"]),
        )


def _beside(theirs: dict[str, Any] | None, figure: str, ours: float) -> tuple[str, ...]:
    if theirs is None:
        return ("not measured",)
    return f"{theirs[figure]:.3f}", f"{theirs[figure] / ours:.3f}"


if __name__ == "__main__":
    main()
