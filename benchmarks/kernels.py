"""Times the attention kernels of a GPU against the chip's own ceilings, in one command.

    python benchmarks/kernels.py [--quick] [--output report.md]
    python benchmarks/kernels.py --alone --decodes 64x256,64x1024 --prefills 8192x8192
    python benchmarks/kernels.py --dry-run          (on any machine: one small row of each kind,
                                                     interpreted; the times have no meaning)

First it measures two ceilings: reading memory, and a large matrix product. Decodes are compared
with the first (bytes of keys and values read once), and prefill chunks with the second (the
products that the causal mask needs). A time is that of `attend` for one layer, including the write
of the step's keys and values and everything around the kernels.

The same run measures, with the same lengths: the XLA backend and, on dense padded keys and values,
cuDNN through jax.nn.dot_product_attention and PyTorch's scaled_dot_product_attention, if they are
installed and support the case. They take most of the time; `--alone` leaves them out.

Before a shape is timed, some of its rows are compared with plain float32 attention.

A shape that fails does not stop the others: its row says so, and the exit status is 1.
"""

import argparse
import datetime
import functools
import importlib.metadata
import importlib.util
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# Leave memory for PyTorch.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Interpreted kernels need more threads than a small machine's XLA has (see tests/conftest.py).
os.environ.setdefault("PJRT_NPROC", str(max(8, os.cpu_count() or 1)))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import side_by_side  # noqa: E402
from jaxllm_kernels.compat import why_no_mosaic_gpu  # noqa: E402
from jaxllm_kernels.platform import chip_of  # noqa: E402
from jaxllm_kernels.ragged_paged_attention.api import (  # noqa: E402
    AttentionBackend,
    AttentionConfig,
    RaggedBatch,
    get_backend,
)
from jaxllm_kernels.ragged_paged_attention.gpu import MosaicGpuBackend  # noqa: E402

# The layers of a timed program together read at least this many bytes, to exceed all caches.
MIN_BYTES = 1 << 30
# The largest dense inputs.
MAX_DENSE_BYTES = 16 << 30

# The goals in per cent of the ceiling: of decodes by the distribution of their lengths, and of
# prefill chunks by their context.
DECODE_GOALS = {"uniform": 92, "log-normal": 88}
PREFILL_GOALS = {8192: 75}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cases to run."""

    backend: AttentionBackend
    config: AttentionConfig
    block_size: int
    decodes: tuple[tuple[int, int], ...]  # rows, tokens of each one's context
    prefills: tuple[tuple[int, int], ...]  # tokens of the chunk, context length after it
    has_peers: bool
    min_bytes: int
    ceiling_bytes: int
    ceiling_side: int  # of the square matrices
    repeats: int


class Lengths(NamedTuple):
    """The rows of a step."""

    query: np.ndarray
    context: np.ndarray


def make_plan(args: argparse.Namespace) -> Plan:
    if args.dry_run:
        return Plan(
            backend=MosaicGpuBackend(name="interpreted", num_workers=2, interpret=True),
            config=AttentionConfig(num_heads=2, num_kv_heads=1, head_size=64, scale=0.125),
            block_size=16,
            decodes=((2, 20),),
            prefills=((8, 20),),
            has_peers=True,
            min_bytes=1,
            ceiling_bytes=1 << 20,
            ceiling_side=128,
            repeats=1,
        )
    batches = (1, 16, 64) if args.quick else (1, 4, 16, 64, 128, 256)
    contexts = (1024, 8192) if args.quick else (1024, 4096, 8192, 32768)
    decodes = tuple(itertools.product(batches, contexts))
    prefills = tuple((n, c) for n in (512, 2048, 8192) for c in (n, 8192, 32768) if c >= n)
    if args.quick:
        prefills = ((2048, 2048), (2048, 8192))
    return Plan(
        backend=get_backend(args.backend).tuned_for(chip_of(jax.devices()[0])),
        # The heads of Llama-3.1-8B.
        config=AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, scale=128**-0.5),
        block_size=args.block_size,
        decodes=decodes if args.decodes is None else args.decodes,
        prefills=prefills if args.prefills is None else args.prefills,
        has_peers=not args.alone,
        min_bytes=MIN_BYTES,
        ceiling_bytes=4 << 30,
        ceiling_side=8192,
        repeats=args.repeats,
    )


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    """Seconds per call: the median of batches of calls dispatched without waiting in between."""
    jax.block_until_ready(run())
    jax.block_until_ready(run())
    calls = 1 if repeats == 1 else 5
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        out = [run() for _ in range(calls)]
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def measure_read_bandwidth(plan: Plan) -> float:
    """Bytes per second of a reduction over an array much larger than the caches."""
    x = jax.random.bits(jax.random.key(0), (plan.ceiling_bytes // 4,), jnp.uint32)
    largest = jax.jit(jnp.max)
    return x.nbytes / median_seconds(lambda: largest(x), plan.repeats)


def measure_matmul_rate(plan: Plan) -> float:
    """Operations per second of a square bfloat16 product of random matrices."""
    side = plan.ceiling_side
    a, b = jax.random.normal(jax.random.key(0), (2, side, side), jnp.bfloat16)
    multiply = jax.jit(jnp.matmul)
    return 2 * side**3 / median_seconds(lambda: multiply(a, b), plan.repeats)


@dataclass(frozen=True)
class Problem:
    """The operands of a step, with a cache for each of several layers."""

    plan: Plan
    lengths: Lengths
    batch: RaggedBatch
    q: jax.Array
    k: jax.Array
    v: jax.Array
    caches: list[jax.Array]

    @classmethod
    def draw(cls, plan: Plan, lengths: Lengths) -> "Problem":
        config, block_size = plan.config, plan.block_size
        num_rows, num_tokens = len(lengths.query), int(lengths.query.sum())
        blocks = -(-lengths.context // block_size)
        free = np.random.default_rng(0).permutation(blocks.sum()).astype(np.int32)
        tables = np.zeros((num_rows, blocks.max()), np.int32)
        for table, owned in zip(tables, np.split(free, blocks.cumsum()[:-1]), strict=True):
            table[: len(owned)] = owned
        decode_only = bool((lengths.query == 1).all())
        batch = RaggedBatch(
            query_starts=jnp.asarray(np.concatenate([[0], lengths.query.cumsum()]), jnp.int32),
            context_lens=jnp.asarray(lengths.context, jnp.int32),
            block_tables=jnp.asarray(tables),
            num_decodes=jnp.int32(num_rows if decode_only else 0),
            block_size=block_size,
            decode_only=decode_only,
        )
        spec = plan.backend.cache_shape(
            config, num_blocks=len(free), block_size=block_size, dtype=jnp.bfloat16
        )
        layers = int(np.clip(plan.min_bytes // (spec.size * 2), 1, 16))
        draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        keys = jax.random.split(jax.random.key(1), layers + 3)
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        q, k, v = (
            draw(key, (num_tokens, n, config.head_size))
            for key, n in zip(keys[:3], heads, strict=True)
        )
        return cls(plan, lengths, batch, q, k, v, [draw(key, spec.shape) for key in keys[3:]])

    @property
    def kv_bytes(self) -> int:
        config = self.plan.config
        return int(self.lengths.context.sum()) * config.num_kv_heads * config.head_size * 4

    @property
    def operations(self) -> int:
        config = self.plan.config
        query, context = (x.astype(np.int64) for x in self.lengths)
        pairs = query * context - query * (query - 1) // 2
        return int(pairs.sum()) * 4 * config.num_heads * config.head_size

    def time(self, backend: AttentionBackend) -> float:
        """Seconds per layer; the caches are updated in place."""
        # Reinterpret the bits, because a backend may store them in another dtype.
        dtype = backend.cache_shape(
            self.plan.config,
            num_blocks=1,
            block_size=self.plan.block_size,
            dtype=jnp.bfloat16,
        ).dtype
        self.caches[:] = [jax.lax.bitcast_convert_type(x, dtype) for x in self.caches]

        # Use loops in the command buffer like the engine: the XLA backend consists of loops.
        options = dict(chip_of(jax.devices()[0]).compiler_options) or None

        @functools.partial(jax.jit, donate_argnums=1, compiler_options=options)
        def step(q, caches, k, v, batch):
            prepared = backend.prepare(batch, (self.plan.config,), num_tokens=len(q))
            new = []
            for cache in caches:
                out, cache = backend.attend(
                    q, k, v, cache, batch, prepared, config=self.plan.config
                )
                q = q + out
                new.append(cache)
            return q, new

        def run():
            out, self.caches[:] = step(self.q, list(self.caches), self.k, self.v, self.batch)
            return out

        return median_seconds(run, self.plan.repeats) / len(self.caches)

    def error(self, backend: AttentionBackend) -> float:
        """Relative error of the last tokens of a few rows, against plain float32 attention."""
        config = self.plan.config

        @functools.partial(jax.jit, donate_argnums=1)
        def attend(q, cache, k, v, batch):
            prepared = backend.prepare(batch, (config,), num_tokens=len(q))
            return backend.attend(q, k, v, cache, batch, prepared, config=config)

        out, cache = attend(self.q, self.caches[0], self.k, self.v, self.batch)
        self.caches[0] = cache
        wrong = total = 0.0
        for row in {0, len(self.lengths.query) // 2, len(self.lengths.query) - 1}:
            context = int(self.lengths.context[row])
            table = self.batch.block_tables[row, : -(-context // self.plan.block_size)]
            token = int(self.lengths.query[: row + 1].sum()) - 1
            expected = _plain_attention(self.q[token], cache[table], context, config)
            wrong += float(jnp.sum((out[token].astype(jnp.float32) - expected) ** 2))
            total += float(jnp.sum(expected**2))
        return (wrong / total) ** 0.5


@functools.partial(jax.jit, static_argnums=(2, 3))
def _plain_attention(q: jax.Array, pages: jax.Array, context: int, config: AttentionConfig):
    """Attention of one token [N, H] to all of its pages [P, 2, K, block_size, H]."""
    kv = jnp.moveaxis(pages.astype(jnp.float32), 0, 2)
    keys, values = kv.reshape(2, config.num_kv_heads, -1, config.head_size)[:, :, :context]
    grouped = q.astype(jnp.float32).reshape(config.num_kv_heads, -1, config.head_size)
    product = functools.partial(jnp.einsum, precision="highest")
    weights = jax.nn.softmax(config.scale * product("kgh,kth->kgt", grouped, keys), axis=-1)
    return product("kgt,kth->kgh", weights, values).reshape(q.shape)


def time_cudnn(problem: Problem) -> float | None:
    """Time cuDNN on dense padded input; None if it is missing or does not support the case."""
    config, (query, context) = problem.plan.config, problem.lengths
    is_decode = bool((query == 1).all())
    if not is_decode and (query != context).any():
        return None  # its causal mask begins at the first key
    rows, longest = len(query), int(context.max())
    if 4 * rows * longest * config.num_kv_heads * config.head_size > MAX_DENSE_BYTES:
        return None
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    keys = jax.random.split(jax.random.key(2), 3)
    q = draw(keys[0], (rows, int(query.max()), config.num_heads, config.head_size))
    k, v = (draw(x, (rows, longest, config.num_kv_heads, config.head_size)) for x in keys[1:])
    attend = jax.jit(
        functools.partial(
            jax.nn.dot_product_attention,
            scale=config.scale,
            is_causal=not is_decode,
            implementation="cudnn",
        )
    )
    lens = dict(
        query_seq_lengths=jnp.asarray(query, jnp.int32),
        key_value_seq_lengths=jnp.asarray(context, jnp.int32),
    )
    return median_seconds(lambda: attend(q, k, v, **lens), problem.plan.repeats)


def time_torch(problem: Problem) -> float | None:
    """Time PyTorch on dense input of equal lengths; None if it does not support the case."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    config, (query, context) = problem.plan.config, problem.lengths
    is_decode = bool((query == 1).all())
    if not torch.cuda.is_available() or len(set(context)) > 1:
        return None
    if not is_decode and (query != context).any():
        return None
    rows, longest = len(query), int(context.max())
    if 4 * rows * longest * config.num_kv_heads * config.head_size > MAX_DENSE_BYTES:
        return None

    def draw(tokens: int, heads: int):
        shape = (rows, heads, tokens, config.head_size)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    q = draw(int(query.max()), config.num_heads)
    k, v = draw(longest, config.num_kv_heads), draw(longest, config.num_kv_heads)
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        scale=config.scale,
        is_causal=not is_decode,
        enable_gqa=True,
    )
    times = []
    for i in range(problem.plan.repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            attend(q, k, v)
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) / 5e3)
    return statistics.median(times)


def decode_lengths(batch: int, context: int, kind: str) -> Lengths:
    contexts = np.full(batch, context)
    if kind == "log-normal":
        drawn = np.random.default_rng(0).lognormal(sigma=0.8, size=batch)
        contexts = np.clip(context * drawn / drawn.mean(), 1, 4 * context).astype(np.int64)
    return Lengths(np.ones(batch, np.int64), contexts)


class Report:
    """Lines that are printed and, if there is a file, written to it at once."""

    def __init__(self, path: Path | None):
        self.has_failures = False
        self._path = path
        if path is not None:
            path.write_text("")

    def add(self, line: str = "") -> None:
        print(line, flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                print(line, file=file)

    def add_row(self, *cells: object) -> None:
        self.add("| " + " | ".join(map(str, cells)) + " |")

    def add_header(self, *cells: str) -> None:
        self.add()
        self.add_row(*cells)
        self.add_row(*["---"] * len(cells))


def versions() -> str:
    """The versions of the measured packages that are installed."""
    found = {}
    for package in ("jax", "torch", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(f"{package} {version}" for package, version in found.items())


def run_row(report: Report, labels: tuple, *args) -> None:
    """Add the row of a step, or its error."""
    try:
        cells = measure_row(*args)
    except Exception as error:
        report.has_failures = True
        cells = [f"FAILED: {_first_line(error)}"]
    report.add_row(*labels, *cells)


def measure_row(plan: Plan, lengths: Lengths, ceiling: float, goal: int | None) -> list[str]:
    """Check and time a step. Its rate and the ceiling are both in bytes or both in operations."""
    problem = Problem.draw(plan, lengths)
    amount = problem.kv_bytes if problem.batch.decode_only else problem.operations

    def cell(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e6:.0f}"

    error = problem.error(plan.backend)
    verdict = f"{error:.1e}" if error < 1e-2 else f"WRONG {error:.1e}"
    seconds = problem.time(plan.backend)
    xla = cudnn = torch = None
    if plan.has_peers:
        xla_backend = get_backend("xla").tuned_for(chip_of(jax.devices()[0]))
        xla = time_beside("XLA", lambda: problem.time(xla_backend))
        problem.caches.clear()
        cudnn = time_beside("cuDNN", lambda: time_cudnn(problem))
        torch = time_beside("PyTorch", lambda: time_torch(problem))
    return [
        cell(seconds),
        f"{amount / seconds / 1e12:.3f}",
        f"{100 * amount / seconds / ceiling:.0f} %",
        "-" if goal is None else f"{goal} %",
        verdict,
        *map(cell, (xla, cudnn, torch)),
    ]


def time_beside(name: str, measure: Callable[[], float | None]) -> float | None:
    """Time a peer; None if it fails, so that our own time is still reported."""
    try:
        return measure()
    except Exception as error:
        print(f"{name}: {_first_line(error)}", flush=True)
        return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__} {error}".splitlines()[0]


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    """The pairs of "64x256,1x8192"; none of an empty text."""
    pairs = (pair.split("x") for pair in text.split(",") if pair)
    return tuple((int(first), int(second)) for first, second in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the attention kernels of a GPU.")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, interpreted on a CPU")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--alone", action="store_true", help="without XLA, cuDNN and PyTorch")
    for name, what in (("decodes", "rows x context"), ("prefills", "chunk x context")):
        parser.add_argument(
            f"--{name}", type=_pairs, metavar="NxM,...", help=f"{what}, in place of the usual ones"
        )
    parser.add_argument("--backend", default="mosaic_sm90")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--output", type=Path, help="write the report there, too")
    args = parser.parse_args()
    if args.dry_run and (why_not := why_no_mosaic_gpu()):
        parser.error(f"the Mosaic GPU backend, which a dry run interprets, {why_not}")
    plan = make_plan(args)

    report = Report(args.output)
    device = jax.devices()[0]
    report.add(f"# Attention kernels on {device.device_kind}")
    report.add()
    report.add(f"{datetime.date.today()}, commit {side_by_side.commit()}, {versions()}")
    report.add(f"{plan.backend}; {plan.config}; blocks of {plan.block_size}")
    if args.dry_run:
        report.add("DRY RUN: the figures below mean nothing.")
    bandwidth, matmul = measure_read_bandwidth(plan), measure_matmul_rate(plan)
    report.add()
    report.add(f"Ceilings: reading {bandwidth / 1e12:.3f} TB/s, matmul {matmul / 1e12:.1f} TFLOP/s")

    times = ("goal", "error", "xla us", "cudnn dense us", "torch dense us")
    report.add_header("batch", "context", "lengths", "us/layer", "TB/s", "of ceiling", *times)
    for batch, context in plan.decodes:
        for kind in ("uniform", "log-normal"):
            lengths = decode_lengths(batch, context, kind)
            labels = (batch, context, kind)
            run_row(report, labels, plan, lengths, bandwidth, DECODE_GOALS[kind])
    report.add_header("chunk", "context", "us/layer", "TFLOP/s", "of ceiling", *times)
    for chunk, context in plan.prefills:
        lengths = Lengths(np.array([chunk]), np.array([context]))
        goal = PREFILL_GOALS.get(context)
        run_row(report, (chunk, context), plan, lengths, matmul, goal)
    if report.has_failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
