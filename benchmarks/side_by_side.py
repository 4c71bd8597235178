"""Shared by the benchmarks: engines in their own processes that alternate, checkpoints for them,
and records of how a figure was measured.

Machines are noisy and differ; only ratios within one run can be compared. An engine here is a
worker. It reads requests and answers with measurements, line by line, and is idle while another
engine runs. This file also runs in a peer's environment, so it imports nothing of jaxllm at the
top.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
SHAPE_350M: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
# A Qwen3-MoE of 1.0 billion parameters; a token uses an eighth of the experts.
SHAPE_EXPERTS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "moe_intermediate_size": 256,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "mlp_only_layers": [],
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
# A Qwen3.5 of 0.43 billion parameters: of each four layers three are recurrent.
SHAPE_RECURRENT: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 20,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "vocab_size": 32000,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
}
SHAPES = {
    "dense": ("llama", SHAPE_350M),
    "experts": ("qwen3_moe", SHAPE_EXPERTS),
    "recurrent": ("qwen3_5", SHAPE_RECURRENT),
}
MAX_NUM_SEQS = 64
PEER_BATCH = 16  # size of static batches for transformers' generate

Request = tuple[list[int], int]  # prompt, number of tokens to generate
Options = dict[str, Any]  # of an engine, by names common to jaxllm and vLLM


class Engine(NamedTuple):
    """The functions that a worker calls."""

    version: str
    # Answers requests; returns the seconds to each first token.
    run: Callable[[list[Request]], list[float]]
    # The same step by step; returns the time of each request's first token, and the times of steps
    # in which all requests got a token. None if the engine cannot be stepped.
    steps: Callable[[list[Request]], tuple[list[float], list[float]]] | None = None


def run_jaxllm(model: str, options: Options) -> Engine:
    import jax

    from jaxllm import LLM, sampling_params

    llm = LLM(model, skip_tokenizer_init=True, **options)
    return _engine_of(llm, sampling_params, f"jax {jax.__version__}")


def run_jaxllm_invariant(model: str, options: Options) -> Engine:
    """jaxllm with the same bits alone and in a crowd, against itself without."""
    return run_jaxllm(model, options | {"batch_invariant": True})


def _engine_of(llm: Any, names: Any, version: str) -> Engine:
    """Make an Engine of jaxllm or vLLM, which have the same calls with the same names."""
    ids = itertools.count()

    def sampling(num_tokens: int, output_kind: str) -> Any:
        return names.SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=names.RequestOutputKind[output_kind],
        )

    def run(requests: list[Request]) -> list[float]:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests],
            [sampling(n, "FINAL_ONLY") for _, n in requests],
            use_tqdm=False,
        )
        for output, (_, wanted) in zip(outputs, requests, strict=True):
            assert len(output.outputs[0].token_ids) == wanted, output
        return [output.metrics.first_token_latency for output in outputs if output.metrics]

    def steps(requests: list[Request]) -> tuple[list[float], list[float]]:
        engine, start = llm.llm_engine, time.perf_counter()
        first_tokens, for_all = {}, []
        for prompt, n in requests:
            engine.add_request(
                f"stepped-{next(ids)}", {"prompt_token_ids": prompt}, sampling(n, "DELTA")
            )
        while engine.has_unfinished_requests():
            outputs = engine.step()
            seconds = time.perf_counter() - start
            for output in outputs:
                first_tokens.setdefault(output.request_id, seconds)
            if len(outputs) == len(requests):
                for_all.append(seconds)
        return list(first_tokens.values()), for_all

    return Engine(version, run, steps)


def run_transformers(model: str, options: Options) -> Engine:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    torch.set_num_threads(os.cpu_count() or 1)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, options["dtype"])).eval()
    hf.generation_config.eos_token_id = None

    class FirstToken(StoppingCriteria):
        at: float | None = None

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            self.at = self.at or time.perf_counter()
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    @torch.inference_mode()
    def run(requests: list[Request]) -> list[float]:
        """Generate in static batches, left-padded, of requests with similar output lengths. Tokens
        beyond a request's length are not counted."""
        start, first_tokens = time.perf_counter(), []
        ordered = sorted(requests, key=lambda request: (request[1], len(request[0])))
        for i in range(0, len(ordered), PEER_BATCH):
            batch = ordered[i : i + PEER_BATCH]
            longest = max(len(prompt) for prompt, _ in batch)
            steps = max(n for _, n in batch)
            first = FirstToken()
            hf.generate(
                torch.tensor([[0] * (longest - len(p)) + p for p, _ in batch]),
                attention_mask=torch.tensor(
                    [[0] * (longest - len(p)) + [1] * len(p) for p, _ in batch]
                ),
                max_new_tokens=steps,
                min_new_tokens=steps,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([first]),
            )
            assert first.at is not None
            first_tokens += [first.at - start] * len(batch)
        return first_tokens

    return Engine(f"transformers {transformers.__version__}", run)


def run_vllm(model: str, options: Options) -> Engine:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # The default leaves a core idle.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    import vllm  # type: ignore[import-not-found]
    import vllm.sampling_params  # type: ignore[import-not-found]

    # Without statistics the outputs lack the time of the first token.
    llm = vllm.LLM(model=model, skip_tokenizer_init=True, disable_log_stats=False, **options)
    return _engine_of(llm, vllm.sampling_params, f"vllm {vllm.__version__}")


def run_llama_cpp(model: str, options: Options) -> Engine:
    sys.path.append(str(Path(__file__).parent))
    import llama_cpp_peer

    peer = llama_cpp_peer.Peer(
        model, options["dtype"], options["max_model_len"], options["max_num_seqs"]
    )
    return Engine(peer.version, peer.run)


ENGINES = {
    "jaxllm": run_jaxllm,
    "jaxllm-invariant": run_jaxllm_invariant,
    "transformers": run_transformers,
    "vllm": run_vllm,
    "llama.cpp": run_llama_cpp,
}


class Worker:
    """An engine in its own process."""

    def __init__(
        self,
        engine: str,
        model: str,
        options: Options,
        python: str = sys.executable,
        script: str = __file__,  # calls `work`
    ):
        start = time.perf_counter()
        self._process = subprocess.Popen(
            # -P: files here have names of packages that a peer may import.
            [python, "-P", script, engine, model, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self._answer().strip()
        self.start_up_s = time.perf_counter() - start

    def run(self, requests: list[Any]) -> dict[str, float]:
        """Measure total seconds, mean seconds to first tokens if there are any, and peak memory."""
        return self._ask("run", requests)

    def decode(self, requests: list[Request]) -> dict[str, float]:
        """Measure seconds to first tokens, and per token while all requests decode. The requests
        must have equal lengths."""
        return self._ask("decode", requests)

    def _ask(self, what: str, requests: list[Any]) -> dict[str, float]:
        assert self._process.stdin is not None
        print(json.dumps([what, requests]), file=self._process.stdin, flush=True)
        return json.loads(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            # It has written all of its answers.
            self._process.kill()
            self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with exit code {self._process.wait()}")
        return line


# The pause between turns. After its last work vLLM polls on a core of its own for 1 s, and its
# OpenMP threads on all others for 0.2 s.
_REST_S = 1.5


def work(engines: dict[str, Callable], name: str, model: str, options: str) -> None:
    """The worker: reads commands, one per line, and answers each with a line of measurements."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output goes to stderr
    engine = engines[name](model, json.loads(options))
    print(engine.version, file=answers, flush=True)
    for line in sys.stdin:
        what, requests = json.loads(line)
        time.sleep(_REST_S)
        figures = (_run if what == "run" else _decode)(engine, requests)
        print(json.dumps(figures), file=answers, flush=True)


def _run(engine: Engine, requests: list[Request]) -> dict[str, float]:
    start, cpu_start = time.perf_counter(), time.process_time()
    first_tokens = engine.run(requests)
    return {
        "seconds": time.perf_counter() - start,
        "cpu_s": time.process_time() - cpu_start,  # without processes of its own
        **({"first_token_s": statistics.mean(first_tokens)} if first_tokens else {}),
        "peak_mib": _peak_mib(),
    }


def _peak_mib() -> float:
    """The peak memory of this process and of all processes that it has started."""
    parents, peaks = {}, {}
    for path in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
            parents[int(lines["Pid"])] = int(lines["PPid"])
            peaks[int(lines["Pid"])] = int(lines.get("VmHWM", "0 kB").split()[0])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(peaks[pid] for pid in ours) / 1024


def _decode(engine: Engine, requests: list[Request]) -> dict[str, float]:
    num_tokens = requests[0][1]
    if engine.steps is None:
        # A static batch gets its first tokens at once, and then one token each per step.
        run = _run(engine, requests)
        first_token_s = run["first_token_s"]
        per_token_s = (run["seconds"] - first_token_s) / max(1, num_tokens - 1)
        return {"first_token_s": first_token_s, "per_token_s": per_token_s}
    first_tokens, for_all = engine.steps(requests)
    figures = {"first_token_s": statistics.mean(first_tokens)}
    if num_tokens == 1:
        return figures
    # The first of these steps may include a prompt's last tokens, and some requests may have ended
    # before the last one.
    gaps = [after - before for before, after in itertools.pairwise(for_all)][1:-1]
    if len(gaps) < 3:
        raise SystemExit(
            f"of {num_tokens} steps {len(requests)} requests decoded in {len(gaps)} together: "
            "give a longer --output-len"
        )
    per_token = {"per_token_s": statistics.median(gaps), "mean_per_token_s": statistics.mean(gaps)}
    return figures | per_token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every benchmark that compares engines."""
    add_model_arguments(parser)
    parser.add_argument(
        "--peers",
        default="transformers",
        help="comma-separated: transformers, vllm, llama.cpp, jaxllm-invariant; '' for none",
    )
    parser.add_argument(
        "--without-jaxllm",
        action="store_true",
        help="run the peers alone: on an accelerator, engines cannot wait beside each other",
    )
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter that has vllm")
    parser.add_argument(
        "--llama-cpp-python",
        metavar="PATH",
        help="interpreter that has llama-cpp-python and gguf",
    )
    parser.add_argument("--repetitions", type=int, default=3)
    add_out_argument(parser)


def add_shape_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="dense", help="without --model")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for the model, and for options that jaxllm and vLLM share."""
    parser.add_argument("--model", help="checkpoint (default: 0.35 billion random parameters)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--load-format", default="auto", help="dummy: random weights for a config")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=MAX_NUM_SEQS)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--kv-cache-memory-bytes", type=int)


def engine_options(args: argparse.Namespace) -> Options:
    """The given options; each engine has its own defaults for the others."""
    names = ("dtype", "load_format", "max_model_len", "max_num_seqs")
    names += ("max_num_batched_tokens", "kv_cache_memory_bytes")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def numbers(text: str) -> list[int]:
    """Parse a list of numbers."""
    return [int(word) for word in text.split(",") if word]


def add_out_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="append the record to it, a line of JSON")
    parser.add_argument("--label", help="a name for the record, to find it by")


@contextlib.contextmanager
def workers(args: argparse.Namespace, model: str) -> Iterator[dict[str, Worker]]:
    """Start jaxllm and the requested peers."""
    started = {}
    ours = [] if args.without_jaxllm else ["jaxllm"]
    pythons = {"vllm": args.vllm_python, "llama.cpp": args.llama_cpp_python}
    try:
        for engine in [*ours, *filter(None, args.peers.split(","))]:
            python = pythons.get(engine, sys.executable)
            if python is None:
                flag = f"--{engine.replace('.', '-')}-python"
                raise SystemExit(f"--peers {engine} needs {flag}")
            started[engine] = Worker(engine, model, engine_options(args), python)
        yield started
    finally:
        for worker in started.values():
            worker.close()


@contextlib.contextmanager
def checkpoint(
    model: str | None, dtype: str = "float32", family: str = "llama", **shape: Any
) -> Iterator[str]:
    """Yield the given model, or one of this family and shape with random weights in a temporary
    folder."""
    if model is not None:
        yield model
        return
    from jaxllm.testing import make_tiny_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        print("making a checkpoint of random weights ...", file=sys.stderr)
        made = make_tiny_checkpoint(Path(folder) / family, family, dtype=dtype, **shape)  # type: ignore[arg-type]
        yield str(made)


def record(benchmark: str, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Append rows of measurements to the file of `add_out_argument`, with all facts that a later
    reader needs."""
    versions = {}
    for package in ("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    line = {
        "benchmark": benchmark,
        **({"label": args.label} if args.label else {}),
        "date": datetime.date.today().isoformat(),
        "command": _command(args.out),
        "commit": commit(),
        "versions": {"python": platform.python_version(), **versions},
        "hardware": hardware(),
        # Also of other programs: load makes a measurement less reliable.
        "load_average": os.getloadavg()[0],
        "rows": rows,
    }
    if args.out is not None:
        with open(args.out, "a", encoding="utf-8") as file:
            print(json.dumps(line), file=file)


def _command(out: str | None) -> str:
    """The command line, without the path of the record."""
    words = [word for word in sys.argv[1:] if word not in ("--out", out, f"--out={out}")]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def hardware() -> str:
    """The processor, its cores and memory; first the GPU, if there is one."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        info = Path("/proc/cpuinfo").read_text()
        name = next(x.partition(": ")[2] for x in info.splitlines() if x.startswith("model name"))
        flags = set(info.split("flags", 1)[1].split("\n", 1)[0].split())
        known = {"avx512f": "AVX-512", "avx512_bf16": "bfloat16", "amx_tile": "AMX"}
        name += "".join(f", {label}" for flag, label in known.items() if flag in flags)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = _output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return ", ".join(filter(None, [gpu, f"{os.cpu_count()} cores, {name}, {memory:.0f} GiB"]))


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far; Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def commit() -> str:
    """The commit of this code, if the git history is there."""
    return _output_of("git", "describe", "--always", "--dirty", "--abbrev=9") or "unknown"


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    work(ENGINES, *sys.argv[1:])
