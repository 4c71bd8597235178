"""The capacity of a frontend, in tokens per second of one process with HTTP, and of the client.

    python benchmarks/frontend.py
    python benchmarks/frontend.py --streams 256 --output-len 128

1. The client of `jaxllm bench`, against a server without cost (prepared bytes, in its own process):
   its tokens per second of its own CPU time. A server that is faster cannot be measured.
2. The frontend, in front of a real engine with a tiny model: tokens per second of the frontend's
   CPU time, including tokenizing and streaming. A frontend is one event loop, so this is the most
   that it can do on one core. In wall time the engine, the client and other programs share the
   cores; CPU time depends little on that, so read the CPU time. A slow frontend merges outputs,
   which makes tokens cheaper. So the conservative figure is pieces per second of CPU time, as if
   each token needed one.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import time

import servers
import side_by_side

from jaxllm.async_http import HTTPClient
from jaxllm.bench.client import OpenAIClient
from jaxllm.bench.datasets import BenchRequest
from jaxllm.bench.load import run_load
from jaxllm.bench.options import LoadOptions
from jaxllm.bench.serve import on_fast_loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint (default: a tiny one)")
    parser.add_argument("--streams", type=int, default=64, help="streams at once")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of each stream")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--chat", action="store_true", help="chat completions")
    side_by_side.add_out_argument(parser)
    args = parser.parse_args()
    rows = [measure_client(args)]
    with side_by_side.checkpoint(args.model) as model:
        flags = ["--max-model-len=1024", f"--max-num-seqs={args.streams}"]
        flags += ["--max-num-batched-tokens=512", "--no-access-log", "--disable-log-stats"]
        with servers.jaxllm(model, *flags) as server:
            rows.append(measure_frontend(server, args))
    for row in rows:
        print(row["what"])
        for name, value in list(row.items())[1:]:
            print(f"  {name:26} {value:12,.2f}")
    side_by_side.record("frontend", rows, args)


def measure_client(args: argparse.Namespace) -> dict:
    with _free_server(args.output_len) as port:
        runs = [_run(port, args) for _ in range(args.repetitions)]
    return {"what": "client, against a free server", **side_by_side.medians(runs)}


def measure_frontend(server: servers.Server, args: argparse.Namespace) -> dict:
    engine_pid = server.engine_pid
    # Give the frontend priority over the engine. Otherwise it would be late and merge outputs, and
    # tokens would be cheaper.
    os.setpriority(os.PRIO_PROCESS, engine_pid, 10)
    _run(server.port, args)
    runs = []
    for _ in range(args.repetitions):
        engine, frontend = side_by_side.cpu_seconds(engine_pid), server.cpu_seconds
        run = _run(server.port, args)
        frontend = server.cpu_seconds - frontend
        engine = side_by_side.cpu_seconds(engine_pid) - engine
        run["frontend_tokens_per_cpu_s"] = run["tokens"] / frontend
        run["frontend_pieces_per_cpu_s"] = run["tokens"] * run["pieces_per_token"] / frontend
        run["engine_tokens_per_cpu_s"] = run["tokens"] / engine
        runs.append(run)
    return {"what": "frontend, in front of an engine", **side_by_side.medians(runs)}


def _run(port: int, args: argparse.Namespace) -> dict[str, float]:
    """Run one load; return the client's measurements."""
    begun, cpu = time.perf_counter(), time.process_time()
    outcomes = on_fast_loop(_load(port, args))
    cpu, seconds = time.process_time() - cpu, time.perf_counter() - begun
    for outcome in outcomes:
        if outcome.has_failed:
            raise SystemExit(f"a request failed: {outcome.error}")
    tokens = sum(outcome.output_len for outcome in outcomes)
    return {
        "tokens": float(tokens),
        # A value below 1 means that outputs were merged, because a process could not keep up.
        "pieces_per_token": sum(len(outcome.itl) + 1 for outcome in outcomes) / tokens,
        "tokens_per_s": tokens / seconds,
        "client_tokens_per_cpu_s": tokens / cpu,
        "ttft_p50_ms": statistics.median(outcome.ttft for outcome in outcomes) * 1e3,
    }


async def _load(port: int, args: argparse.Namespace) -> list:
    load = LoadOptions(backend="openai-chat" if args.chat else "openai", ignore_eos=True)
    http = HTTPClient(f"http://127.0.0.1:{port}", {})
    client = OpenAIClient.of(http, load, (await _model(http)))
    requests = [
        BenchRequest(f"{i} " + "the engine keeps a queue of requests " * 4, 0, args.output_len)
        for i in range(args.requests)
    ]
    run = await run_load(client, requests, [0.0] * len(requests), args.streams)
    http.close()
    return run.outcomes


async def _model(http: HTTPClient) -> str:
    from jaxllm.bench.client import find_model

    return (await find_model(http)).name


class _free_server:
    """Answers every POST with the same bytes, one token per write, as fast as possible."""

    def __init__(self, output_len: int):
        self._ports = multiprocessing.SimpleQueue()
        self._process = multiprocessing.Process(
            target=_serve_free, args=(output_len, self._ports), daemon=True
        )

    def __enter__(self) -> int:
        self._process.start()
        return self._ports.get()

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()


def _serve_free(output_len: int, ports: "multiprocessing.SimpleQueue[int]") -> None:
    chunk = (
        b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion",'
        b'"created":1700000000,"model":"m","system_fingerprint":null,"choices":[{"index":0,'
        b'"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null}],'
        b'"usage":null}\n\n'
    )
    last = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d}}\n\n'
    end = chunk.replace(b'reason":null', b'reason":"length"', 1) + last % output_len
    end += b"data: [DONE]\n\n"
    token = b"%x\r\n%b\r\n" % (len(chunk), chunk)
    tail = b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end)
    models = b'{"data":[{"id":"m"}]}'

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            if head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(models))
                writer.write(models)
                continue
            length = next(x for x in head.split(b"\r\n") if x.lower().startswith(b"content-length"))
            await reader.readexactly(int(length.partition(b":")[2]))
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(output_len - 1):
                writer.write(token)
                await asyncio.sleep(0)  # send each in its own packet, like a real server
            writer.write(tail)

    async def serve() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    on_fast_loop(serve())


if __name__ == "__main__":
    main()
