"""Times the XLA attention backend per layer, beside dense masked attention in the same run.

    python benchmarks/attention_xla.py [--dtypes bfloat16,float32] [--repeats 20]

The dense form computes every query against contiguous keys and values of the longest context,
[B, K, T, H], which nothing writes: it is the floor of plain XLA without pages. Each program chains
several layers, each with its own cache, so that keys and values do not stay in a processor's cache.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig, RaggedBatch
from jaxllm_kernels.ragged_paged_attention.xla import XlaBackend

NUM_LAYERS = 8
CONFIG = AttentionConfig(num_heads=16, num_kv_heads=8, head_size=64, scale=0.125)


class Times(NamedTuple):
    """Microseconds per layer: the minimum, and the CPU time of all threads (median)."""

    best: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.best:8.0f} ({self.cpu:8.0f})"


def measure(run: Callable[[], object], repeats: int) -> Times:
    jax.block_until_ready(run())
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(run())
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    per_layer = 1e6 / NUM_LAYERS
    return Times(min(walls) * per_layer, statistics.median(cpus) * per_layer)


def time_paged(
    backend: XlaBackend, query_lens: np.ndarray, context_lens: np.ndarray, args, dtype, block_size
) -> Times:
    rows, num_tokens = len(query_lens), int(query_lens.sum())
    per_row = -(-int(context_lens.max()) // block_size)
    tables = np.random.default_rng(0).permutation(rows * per_row).reshape(rows, per_row)
    decode_only = bool((query_lens == 1).all())
    batch = RaggedBatch(
        query_starts=jnp.asarray(np.concatenate([[0], query_lens.cumsum()]), jnp.int32),
        context_lens=jnp.asarray(context_lens, jnp.int32),
        block_tables=jnp.asarray(tables, jnp.int32),
        num_decodes=jnp.int32((query_lens == 1).sum()),
        block_size=block_size,
        decode_only=decode_only,
    )
    spec = backend.cache_shape(CONFIG, num_blocks=tables.size, block_size=block_size, dtype=dtype)
    caches = [jnp.zeros(spec.shape, spec.dtype) for _ in range(NUM_LAYERS)]
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (num_tokens, CONFIG.num_heads, CONFIG.head_size), dtype)
    k, v = jax.random.normal(keys[1], (2, num_tokens, CONFIG.num_kv_heads, CONFIG.head_size), dtype)

    @functools.partial(jax.jit, donate_argnums=1)
    def layers(q, caches, batch):
        prepared = backend.prepare(batch, (CONFIG,), num_tokens=num_tokens)
        new = []
        for cache in caches:
            out, cache = backend.attend(q, k, v, cache, batch, prepared, config=CONFIG)
            q = q + out
            new.append(cache)
        return q, new

    def run():
        nonlocal caches
        out, caches = layers(q, caches, batch)
        return out

    return measure(run, args.repeats)


def time_dense(query_lens: np.ndarray, context_lens: np.ndarray, args, dtype) -> Times:
    rows, longest, query_len = len(query_lens), int(context_lens.max()), int(query_lens.max())
    heads, group = CONFIG.num_kv_heads, CONFIG.num_heads // CONFIG.num_kv_heads
    shape = (rows, heads, longest, CONFIG.head_size)
    kv = [jax.random.normal(jax.random.key(i), (2, *shape), dtype) for i in range(NUM_LAYERS)]
    keys, values = [x[0] for x in kv], [x[1] for x in kv]
    q = jax.random.normal(jax.random.key(99), (rows, heads, group * query_len, shape[-1]), dtype)
    lens = jnp.asarray(context_lens, jnp.int32)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    @jax.jit
    def layers(q, keys, values, lens):
        positions = lens[:, None] - query_len + jnp.arange(group * query_len) // group
        seen = jnp.arange(longest) <= positions[:, None, :, None]
        for k, v in zip(keys, values, strict=True):
            scores = jnp.where(seen, CONFIG.scale * product("bklh,bkth->bklt", q, k), -1e30)
            weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
            q = q + product("bklt,bkth->bklh", weights, v).astype(dtype)
        return q

    return measure(lambda: layers(q, keys, values, lens), args.repeats)


def workloads() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Query and context lengths by name."""
    ones = np.ones(16, np.int64)
    skewed = np.full(16, 64)
    skewed[0] = 2048
    return {
        "decode 1 x 256": (ones[:1], 256 * ones[:1]),
        "decode 16 x 256": (ones, 256 * ones),
        "decode 16 x 2048": (ones, 2048 * ones),
        "decode 15 x 64, 1 x 2048": (ones, skewed),
        "prefill 1 x 2048": (np.array([2048]), np.array([2048])),
        "prefill 16 x 128": (128 * ones, 128 * ones),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the XLA attention backend.")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--block-sizes", default="16,32,64")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="run workloads whose name contains this")
    parser.add_argument("--tile-size", type=int, default=XlaBackend().tile_size)
    args = parser.parse_args()
    backend = XlaBackend(tile_size=args.tile_size)
    print(f"jax {jax.__version__} {jax.default_backend()}; {backend}; us per layer: best (cpu)")
    for dtype in args.dtypes.split(","):
        for name, lens in workloads().items():
            if args.only not in name:
                continue
            dense = time_dense(*lens, args, dtype)
            line = f"{dtype:9s} {name:26s} dense {dense}"
            for block_size in map(int, args.block_sizes.split(",")):
                paged = time_paged(backend, *lens, args, dtype, block_size)
                line += f" | block {block_size:3d} {paged} x{paged.best / dense.best:.2f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
