"""What Ray Serve adds: replicas under it beside replicas of one server, alternating in one run.

    python benchmarks/fleet.py

The same tiny model is served twice: by `jaxllm serve --data-parallel-size N`, and by N engines
under Ray Serve with one frontend. A step of it takes about a millisecond, so what is measured is
nearly all that lies around the steps: HTTP, text, messages, and Ray's proxy, router and streams.
First one client after another asks, for the time to the first token; then many at once, for tokens
per second and processor time per token, of all processes of a server together. Both run at the same
time, and take turns, so that the load of the machine is the same for both.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import servers
import side_by_side

from jaxllm.testing import make_tiny_checkpoint

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 1024,
    "enforce_eager": True,
}
PATH = "/v1/completions"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--alone", type=int, default=20, help="requests one after another, a turn")
    parser.add_argument("--at-once", type=int, default=48, help="requests at once, a turn")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--under-ray", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    side_by_side.add_out_argument(parser)
    args = parser.parse_args()
    if args.under_ray is not None:
        serve_under_ray(args.under_ray, args.replicas, args.port)
        return
    # Replicas in one process need a device each.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.replicas}"
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in ENGINE.items()
    ]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = str(make_tiny_checkpoint(Path(folder) / "model"))
        one = servers.jaxllm(
            model, *flags, f"--data-parallel-size={args.replicas}", "--no-access-log"
        )
        fleet = [sys.executable, __file__, f"--replicas={args.replicas}", f"--under-ray={model}"]
        running = [
            stack.enter_context(one),
            stack.enter_context(servers.started("Ray Serve", fleet, "/ready")),
        ]
        rows = asyncio.run(measure(running, args))
    for row in rows:
        print(
            "  ".join(
                f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
            )
        )
    side_by_side.record("fleet", rows, args)


def serve_under_ray(model: str, num_replicas: int, port: int) -> None:
    """Serve until SIGTERM."""
    import ray
    from ray import serve

    from jaxllm.server.ray import build

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ray.init("local", num_cpus=num_replicas + 2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"port": port})
        serve.run(build(model=model, num_replicas=num_replicas, **ENGINE))
        signal.pause()
    finally:
        serve.shutdown()
        ray.shutdown()


async def measure(running: list[servers.Server], args: argparse.Namespace) -> list[dict[str, Any]]:
    turns: list[list[dict[str, float]]] = [[] for _ in running]
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        for turn in range(args.turns + 1):
            for found, server in zip(turns, running, strict=True):
                result = await one_turn(client, server, args)
                if turn:  # the first one warms up
                    found.append(result)
    rows = []
    for found, server in zip(turns, running, strict=True):
        medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
        rows.append({"server": server.name, "replicas": args.replicas, **medians})
    return rows


async def one_turn(
    client: httpx.AsyncClient, server: servers.Server, args: argparse.Namespace
) -> dict[str, float]:
    alone = [await ask(client, server, i, args.output_len) for i in range(args.alone)]
    cpu, start = cpu_of_all(server.pid), time.perf_counter()
    many = [ask(client, server, i, args.output_len) for i in range(args.at_once)]
    await asyncio.gather(*many)
    seconds, num_tokens = time.perf_counter() - start, args.at_once * args.output_len
    return {
        "first_token_ms": 1e3 * statistics.median(first for first, _ in alone),
        "ms_per_token": 1e3 * statistics.median(rest for _, rest in alone),
        "tokens_per_s": num_tokens / seconds,
        "cpu_ms_per_token": 1e3 * (cpu_of_all(server.pid) - cpu) / num_tokens,
    }


async def ask(
    client: httpx.AsyncClient, server: servers.Server, place: int, length: int
) -> tuple[float, float]:
    """The seconds to the first token of a stream, and from there for each token."""
    body = {"prompt": f"Number {place}", "max_tokens": length, "ignore_eos": True, "stream": True}
    start, first = time.perf_counter(), None
    url = f"http://127.0.0.1:{server.port}{PATH}"
    async with client.stream("POST", url, json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if first is None and line.startswith("data: {"):
                first = time.perf_counter()
    assert first is not None
    return first - start, (time.perf_counter() - first) / (length - 1)


def cpu_of_all(pid: int) -> float:
    """Processor time so far of a process and of all that it has started."""
    try:
        total = side_by_side.cpu_seconds(pid)
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except FileNotFoundError:
        return 0.0  # it has ended
    return total + sum(cpu_of_all(int(child)) for child in children)


if __name__ == "__main__":
    main()
