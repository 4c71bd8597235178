"""Whether clients disturb the engine: its steps per second with and without a thousand connections.

    python benchmarks/connections.py
    python benchmarks/connections.py --connections 300 --rounds 3

A server runs a fixed number of streams. A number of its steps is timed, alternately alone and
beside connections of three kinds, each time with new streams:

- idle ones; half of them have sent a part of a request's head;
- slow ones: streams that are requested and not read, with small buffers;
- ones that request a stream and are reset, a given number per second (--resets).

It reports steps per second, as a ratio, and the CPU time of both processes per step, which other
programs on the machine disturb less. Half of the measured streams are read slowly. The requests of
the connections wait behind the streams, which have priority. The streams begin when all connections
exist. So the batch is the same in both cases, including the lengths of its contexts, and any
difference is caused by the connections.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import struct
import time
from collections.abc import Awaitable, Callable

import servers
import side_by_side

KINDS = ("idle", "slow", "reset")
_ON_THE_WAY_S = 0.5  # from sending a request to its place in the engine's queue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint (default: one of 8 layers of 256)")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--resets", type=float, default=50.0, help="connections reset in a second")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400, help="of each measurement")
    side_by_side.add_out_argument(parser)
    args = parser.parse_args()
    shape = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 512}
    with side_by_side.checkpoint(args.model, **shape) as model:
        flags = [f"--max-num-seqs={args.streams}", "--max-model-len=2048"]
        flags += ["--max-num-batched-tokens=64", "--scheduling-policy=priority"]
        flags += ["--no-access-log", "--disable-log-stats"]
        with servers.jaxllm(model, *flags) as server:
            rounds = asyncio.run(measure(server, args))
    rows = [summary(rounds)]
    for name, value in rows[0].items():
        print(f"{name:34} {value:10.3f}")
    side_by_side.record("connections", rows + rounds, args)


async def measure(server: servers.Server, args: argparse.Namespace) -> list[dict[str, float]]:
    """Measure a row for each round, alone and beside the connections."""
    engine_pid, rounds = server.engine_pid, []
    for number in range(args.rounds):
        row = {}
        # Alternate the order, so that neither case has the warmer machine.
        for kind in ("alone", "beside") if number % 2 else ("beside", "alone"):
            async with contextlib.AsyncExitStack() as stack:
                # These streams occupy the slots until the connections exist.
                holders = await stack.enter_async_context(contextlib.AsyncExitStack())
                await holders.enter_async_context(streams(server.port, args.streams))
                crowd = args.connections if kind == "beside" else 0
                await stack.enter_async_context(connections(server.port, crowd, args.resets))
                await until(server, "num_requests_waiting", crowd // len(KINDS))
                measured = streams(server.port, args.streams, when_asked=holders.aclose)
                await stack.enter_async_context(measured)
                figures = await step_figures(server, engine_pid, args.steps)
            await until(server, "num_requests_running", 0, at_most=True)
            await until(server, "num_requests_waiting", 0, at_most=True)
            row |= {f"{kind}_{name}": figure for name, figure in figures.items()}
        rounds.append(row)
    return rounds


async def until(
    server: servers.Server, metric: str, value: float, *, at_most: bool = False
) -> None:
    """Wait until a metric of the server is at least, or at most, this value."""
    while True:
        found = await asyncio.to_thread(server.metric, metric)
        if found <= value if at_most else found >= value:
            return
        await asyncio.sleep(0.1)


def summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    ratios = [row["beside_steps_per_s"] / row["alone_steps_per_s"] for row in rounds]
    return {
        **side_by_side.medians(rounds),
        "ratio_of_steps_per_s": statistics.median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
        **{
            f"ratio_of_{name}": statistics.median(
                row[f"beside_{name}"] / row[f"alone_{name}"] for row in rounds
            )
            for name in ("cpu_ms_per_step", "frontend_cpu_ms_per_step")
        },
    }


async def step_figures(server: servers.Server, engine_pid: int, num_steps: int) -> dict[str, float]:
    """Measure steps per second, and CPU milliseconds of a step."""

    async def look() -> tuple[float, float, float, float]:
        steps = await asyncio.to_thread(server.metric, "engine_steps_total")
        cpu = side_by_side.cpu_seconds(engine_pid)
        return steps, time.perf_counter(), cpu, server.cpu_seconds

    before = after = await look()
    while after[0] - before[0] < num_steps:
        await asyncio.sleep(0.25)
        after = await look()
    steps, wall, cpu, frontend_cpu = (b - a for a, b in zip(before, after, strict=True))
    return {
        "steps_per_s": steps / wall,
        "cpu_ms_per_step": cpu / steps * 1e3,
        "frontend_cpu_ms_per_step": frontend_cpu / steps * 1e3,
    }


@contextlib.asynccontextmanager
async def streams(
    port: int, num_streams: int, when_asked: Callable[[], Awaitable[object]] | None = None
):
    """Run streams within this context, which begins when all of them have begun. Every other stream
    is read slowly. `when_asked` runs after all have been requested, and may make room for them."""
    have_begun = asyncio.Semaphore(0)

    async def stream(pause_s: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
        writer.write(request(max_tokens=1900, priority=-1))
        try:
            await reader.readuntil(b"data: ")
            have_begun.release()
            while await reader.read(1 << 16):
                await asyncio.sleep(pause_s)
            raise SystemExit("a stream has ended too early; give fewer --steps")
        finally:
            writer.close()

    tasks = [asyncio.create_task(stream(i % 2 * 0.5)) for i in range(num_streams)]
    if when_asked is not None:
        await asyncio.sleep(_ON_THE_WAY_S)
        await when_asked()
    for _ in tasks:
        await have_begun.acquire()
    yield
    await _cancel(tasks)


@contextlib.asynccontextmanager
async def connections(port: int, number: int, resets_per_s: float):
    """Hold this many connections of the three kinds within this context."""
    of_kind = {kind: number // len(KINDS) for kind in KINDS}
    held = [await _open(port) for _ in range(of_kind["idle"] + of_kind["slow"])]
    for place, one in enumerate(held[: of_kind["idle"]]):
        if place % 2:
            one.send(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
    for one in held[of_kind["idle"] :]:
        one.send(request(max_tokens=1000))

    async def reset() -> None:
        """Send requests, one after another, and reset each connection."""
        while True:
            one = await _open(port)
            one.send(request(max_tokens=1000))
            await asyncio.sleep(of_kind["reset"] / resets_per_s)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()

    tasks = [asyncio.create_task(reset()) for _ in range(of_kind["reset"])]
    yield
    await _cancel(tasks)
    for one in held:
        one.close()


def request(**fields: object) -> bytes:
    body = json.dumps(
        {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, **fields}
    ).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % len(
        body
    ) + (b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body)


async def _open(port: int) -> socket.socket:
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.setblocking(False)
    await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", port))
    return one


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    main()
