"""Start-up times: Python's imports, the command, an engine cold and warm, the server.

    python benchmarks/startup.py
    python benchmarks/startup.py --model DIR --skip-cold

Each measurement is a process, from its start to an event: the end of `import jaxllm` and of `jaxllm
--help` (beside an interpreter that does nothing), the first token of `jaxllm generate` with an
empty compilation cache and with a full one, and an answer of /ready. CPU time is reported, too,
because other programs on the machine disturb it less.
"""

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import servers
import side_by_side
from side_by_side import ROOT

# The time of an answer of one token is the time to the first token.
_GENERATE = """
import sys, time
from jaxllm import LLM, SamplingParams
llm = LLM(sys.argv[1], compilation_cache_dir=sys.argv[2], max_model_len=1024, max_num_seqs=16,
          enforce_eager=sys.argv[3] == "eager", compile_behind=sys.argv[3] == "behind")
[output] = llm.generate(["Once upon a time"], SamplingParams(max_tokens=1), use_tqdm=False)
assert len(output.outputs[0].token_ids) == 1
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint (default: a tiny one)")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--skip-cold", action="store_true", help="a cold start takes a minute")
    side_by_side.add_out_argument(parser)
    args = parser.parse_args()
    rows = [
        timed("python -c pass", args.repetitions, command("-c", "pass")),
        timed("import jaxllm", args.repetitions, command("-c", "import jaxllm")),
        timed("jaxllm --help", args.repetitions, command("-m", "jaxllm.cli.main", "--help")),
    ]
    with (
        side_by_side.checkpoint(args.model) as model,
        tempfile.TemporaryDirectory() as cache,
        tempfile.TemporaryDirectory() as behind,
        tempfile.TemporaryDirectory() as eager,
    ):
        for what, repetitions, arguments in [
            ("first token, cold", 1, [cache, "all"]),
            ("first token, warm", args.repetitions, [cache, "all"]),
            ("first token, cold, --compile-behind", 1, [behind, "behind"]),
            ("first token, warm, --compile-behind", args.repetitions, [cache, "behind"]),
            ("first token, cold, --enforce-eager", 1, [eager, "eager"]),
            ("first token, warm, --enforce-eager", args.repetitions, [eager, "eager"]),
        ]:
            if "cold" in what and args.skip_cold:
                # Run it once to fill the cache.
                command("-c", _GENERATE, model, *arguments)()
                continue
            rows.append(timed(what, repetitions, command("-c", _GENERATE, model, *arguments)))
        rows.append(time_to_ready(model, cache, args.repetitions))
    side_by_side.record("startup", rows, args)


def command(*arguments: str) -> Callable[[], str]:
    """Make a function that runs Python and returns its stderr."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])

    def run() -> str:
        return subprocess.run(
            [sys.executable, *arguments],
            check=True,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
        ).stderr

    return run


def timed(what: str, repetitions: int, run: Callable[[], str]) -> dict:
    """Measure seconds and CPU seconds of a process, and print them."""
    runs, programs = [], ""
    for _ in range(repetitions):
        cpu = _cpu_of_children()
        start = time.perf_counter()
        log = run()
        runs.append({"s": time.perf_counter() - start, "cpu_s": _cpu_of_children() - cpu})
        found = re.search(r"compiled (\d+) programs? in ([\d.]+) s: .* from the compilation", log)
        programs = found[0].removesuffix(" from the compilation") if found else ""
    row = {"what": what, **side_by_side.medians(runs), "programs": programs}
    row["least_s"] = min(run["s"] for run in runs)
    _show(row)
    return row


def time_to_ready(model: str, cache: str, repetitions: int) -> dict:
    """Measure `jaxllm serve` until it is ready."""
    runs = []
    flags = ["--max-model-len=1024", "--max-num-seqs=16", f"--compilation-cache-dir={cache}"]
    for _ in range(repetitions):
        with servers.jaxllm(model, *flags) as server:
            cpu = side_by_side.cpu_seconds(server.engine_pid) + server.cpu_seconds
            runs.append({"s": server.start_up_s, "cpu_s": cpu})
    row = {"what": "/ready of jaxllm serve, warm", **side_by_side.medians(runs), "programs": ""}
    row["least_s"] = min(run["s"] for run in runs)
    _show(row)
    return row


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _show(row: dict) -> None:
    print(
        f"{row['what']:36} {row['s']:8.2f} s (least {row['least_s']:.2f})   "
        f"{row['cpu_s']:8.2f} CPU s   {row['programs']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
