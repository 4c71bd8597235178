"""Embeddings of an encoder beside its peers, in one run: texts a second, and one query.

    python benchmarks/embeddings.py --model all-MiniLM-L6-v2
    python benchmarks/embeddings.py --model DIR --sentence-transformers-python PATH \
        --infinity-python PATH

The texts are docstrings of the standard library, sorted by length, and cut where the model's
files say. Engines are processes that alternate, with all cores and the same type. The query goes
to each engine in its process, and to the servers of jaxllm and infinity over HTTP.
"""

import argparse
import asyncio
import contextlib
import http.client
import importlib
import inspect
import json
import pkgutil
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # a worker starts without it

import servers
import side_by_side
from side_by_side import Engine, Options, Worker

sys.path.pop()  # files there have names of packages that a peer may import

NUM_TEXTS = 1024
QUERIES = 64
_SHOWS_SOMETHING = {"antigravity", "idlelib", "this", "turtle", "turtledemo"}  # when imported
NAME = "encoder"  # of the model, to the servers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="a directory, such as all-MiniLM-L6-v2")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--repetitions", type=int, default=3)
    for peer in ("sentence-transformers", "infinity"):
        parser.add_argument(f"--{peer}-python", metavar="PATH", help=f"interpreter that has {peer}")
    side_by_side.add_out_argument(parser)
    args = parser.parse_args()
    rows = [*texts_a_second(args), *query_over_http(args)]
    side_by_side.record("embeddings", rows, args)


def docstrings() -> list[str]:
    """Read the docstrings of the standard library, in an order that looks random."""
    docs = set()
    for module in pkgutil.iter_modules():
        is_public = module.name in sys.stdlib_module_names and not module.name.startswith("_")
        if is_public and module.name not in _SHOWS_SOMETHING:
            with contextlib.suppress(Exception):
                members = vars(importlib.import_module(module.name)).values()
                classes = [vars(one).values() for one in members if inspect.isclass(one)]
                docs |= {inspect.getdoc(one) for group in [members, *classes] for one in group}
    texts = sorted(text for text in docs if text and len(text) > 20)
    random.Random(0).shuffle(texts)
    return texts


def short(texts: list[str]) -> list[str]:
    """Return a few texts that are as long as a question."""
    return [text for text in texts if len(text) < 120][:QUERIES]


def texts_a_second(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All texts at once, and one at a time."""
    texts = docstrings()
    batch, queries = sorted(texts[:NUM_TEXTS], key=len), short(texts)
    pythons = {"jaxllm": sys.executable}
    pythons |= {
        "sentence-transformers": args.sentence_transformers_python,
        "infinity": args.infinity_python,
    }
    options = {"dtype": args.dtype}
    workers = {
        name: Worker(name, args.model, options, python, script=__file__)
        for name, python in pythons.items()
        if python
    }
    rows = []
    for what, calls in (("texts", [batch]), ("query", [[query] for query in queries])):
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
        for turn in range(args.repetitions + 1):
            for name, worker in workers.items():
                figures = worker.run(calls)
                if turn:  # the first one warms up
                    taken[name].append(figures)
        count = sum(map(len, calls))
        for name, figures in taken.items():
            row = side_by_side.medians(figures)
            rows.append({"what": what, "engine": name, "version": workers[name].version, **row})
            print(
                f"{what:6} {name:22} {count / row['seconds']:8.1f} a second, "
                f"{row['seconds'] / count * 1e3:7.2f} ms each, {row['cpu_s'] / count * 1e3:7.2f} "
                f"of CPU time, {row['peak_mib']:6.0f} MiB",
                flush=True,
            )
    for worker in workers.values():
        worker.close()
    return rows


def query_over_http(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One query after another over a connection that stays open."""
    queries = short(docstrings())
    with contextlib.ExitStack() as stack:
        flags = ["--dtype", args.dtype, "--served-model-name", NAME]
        running = [stack.enter_context(servers.jaxllm(args.model, *flags, "--no-access-log"))]
        if args.infinity_python:
            command = [str(Path(args.infinity_python).parent / "infinity_emb"), "v2"]
            command += ["--model-id", args.model, "--device", "cpu", *flags]
            command += ["--url-prefix", "/v1", "--no-bettertransformer"]
            running.append(stack.enter_context(servers.started("infinity", command)))
        taken: dict[str, list[float]] = {server.name: [] for server in running}
        for turn in range(args.repetitions + 1):
            for server in running:
                seconds = [*ask(server.port, queries)]
                if turn:
                    taken[server.name] += seconds
    rows = []
    for name, seconds in taken.items():
        row = {"what": "query over HTTP", "engine": name, "median_s": statistics.median(seconds)}
        rows.append(row | {"p90_s": statistics.quantiles(seconds, n=10)[-1]})
        print(f"query over HTTP {name:10} {row['median_s'] * 1e3:7.2f} ms", flush=True)
    return rows


def ask(port: int, queries: list[str]) -> list[float]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    seconds = []
    for query in queries:
        body = json.dumps({"model": NAME, "input": query, "encoding_format": "base64"})
        begun = time.perf_counter()
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        seconds.append(time.perf_counter() - begun)
        if response.status != 200:
            raise SystemExit(f"port {port}: {answer.decode()}")
    connection.close()
    return seconds


def run_jaxllm(model: str, options: Options) -> Engine:
    import jax

    from jaxllm import LLM

    llm = LLM(model, **options)

    def run(calls: list[list[str]]) -> list[float]:
        for texts in calls:
            cut = {"truncate_prompt_tokens": -1}
            assert len(llm.embed(texts, tokenization_kwargs=cut, use_tqdm=False)) == len(texts)
        return []

    return Engine(f"jax {jax.__version__}", run)


def run_sentence_transformers(model: str, options: Options) -> Engine:
    import sentence_transformers  # type: ignore[import-not-found]
    import torch

    dtype = getattr(torch, options["dtype"])
    oracle = sentence_transformers.SentenceTransformer(
        model, device="cpu", model_kwargs={"dtype": dtype}
    )

    def run(calls: list[list[str]]) -> list[float]:
        for texts in calls:
            assert len(oracle.encode(texts, show_progress_bar=False)) == len(texts)
        return []

    return Engine(f"sentence-transformers {sentence_transformers.__version__}", run)


def run_infinity(model: str, options: Options) -> Engine:
    import infinity_emb  # type: ignore[import-not-found]

    engine = infinity_emb.AsyncEmbeddingEngine.from_args(
        infinity_emb.EngineArgs(
            model_name_or_path=model, device="cpu", dtype=options["dtype"], bettertransformer=False
        )
    )
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.astart())

    def run(calls: list[list[str]]) -> list[float]:
        for texts in calls:
            vectors, _ = loop.run_until_complete(engine.embed(sentences=texts))
            assert len(vectors) == len(texts)
        return []

    return Engine("infinity", run)


ENGINES = {
    "jaxllm": run_jaxllm,
    "sentence-transformers": run_sentence_transformers,
    "infinity": run_infinity,
}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ENGINES:
        side_by_side.work(ENGINES, *sys.argv[1:])
    else:
        main()
