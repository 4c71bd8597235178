"""Attention on a CPU: XLA's loops and our own kernel, alternating.

    python benchmarks/attention_cpu.py [--only decode] [--block-size 32]

The shape is 16 query heads, 8 kv heads and head size 64. A program chains layers, each with its own
cache, so that keys and values are not in a processor's cache. The time is the CPU time of all
threads, because other programs on the machine disturb it least. The minimum of several runs counts.
"""

import argparse
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxllm_kernels.native import library
from jaxllm_kernels.ragged_paged_attention.api import (
    AttentionBackend,
    AttentionConfig,
    RaggedBatch,
    get_backend,
)
from jaxllm_kernels.ragged_paged_attention.native import NativeBackend

NUM_LAYERS = 8
CONFIG = AttentionConfig(num_heads=16, num_kv_heads=8, head_size=64, scale=0.125)
# Query and context lengths of the rows.
WORKLOADS = {
    "decode 16 x 256": ([1] * 16, [256] * 16),
    "decode 1 x 1024": ([1], [1024]),
    "decode 16 x 2048": ([1] * 16, [2048] * 16),
    "prefill 1 x 512": ([512], [512]),
    "prefill 1 x 2048": ([2048], [2048]),
}


def make_step(
    backend: AttentionBackend, query_lens: list[int], context_lens: list[int], dtype, block_size
) -> Callable[[], jax.Array]:
    """Layers of attention, one after another."""
    rows, num_tokens = len(query_lens), sum(query_lens)
    per_row = -(-max(context_lens) // block_size)
    tables = np.random.default_rng(0).permutation(rows * per_row).reshape(rows, per_row)
    decode_only = max(query_lens) == 1
    batch = RaggedBatch(
        query_starts=jnp.asarray(np.cumsum([0, *query_lens]), jnp.int32),
        context_lens=jnp.asarray(context_lens, jnp.int32),
        block_tables=jnp.asarray(tables, jnp.int32),
        num_decodes=jnp.int32(rows if decode_only else 0),
        block_size=block_size,
        decode_only=decode_only,
    )
    spec = backend.cache_shape(CONFIG, num_blocks=tables.size, block_size=block_size, dtype=dtype)
    caches = [jnp.zeros(spec.shape, spec.dtype) for _ in range(NUM_LAYERS)]
    q, k, v = (
        jax.random.normal(jax.random.key(i), (num_tokens, heads, CONFIG.head_size), dtype)
        for i, heads in enumerate((CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.num_kv_heads))
    )

    @functools.partial(jax.jit, donate_argnums=1)
    def layers(q, caches, batch):
        prepared = backend.prepare(batch, (CONFIG,), num_tokens=num_tokens)
        new = []
        for cache in caches:
            out, cache = backend.attend(q, k, v, cache, batch, prepared, config=CONFIG)
            q = q + out
            new.append(cache)
        return q, new

    def step() -> jax.Array:
        nonlocal caches
        out, caches = layers(q, caches, batch)
        return jax.block_until_ready(out)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description="Time attention on a CPU.")
    parser.add_argument("--only", default="", help="run workloads whose name contains this")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    ours = library.load(Path(tempfile.mkdtemp()))
    if isinstance(ours, library.NoLibrary):
        parser.exit(1, f"{ours.reason}\n")
    backends = (get_backend("xla"), NativeBackend(ours))
    print(f"blocks of {args.block_size}; ms per layer of the processor (of the clock)")
    print(f"{'type':<10}{'':<18}{'XLA':>16}{'native':>16}{'ratio':>8}")
    for dtype in ("bfloat16", "float32"):
        for name, lens in WORKLOADS.items():
            if args.only not in name:
                continue
            steps = [make_step(b, *lens, dtype, args.block_size) for b in backends]
            least = np.full((2, 2), np.inf)  # [backend, (processor, clock)]
            for repeat in range(args.repeats + 1):
                for i, step in enumerate(steps):
                    cpu, wall = time.process_time(), time.perf_counter()
                    step()
                    times = time.process_time() - cpu, time.perf_counter() - wall
                    if repeat > 0:  # the first compiles
                        least[i] = np.minimum(least[i], np.array(times) * 1e3 / NUM_LAYERS)
            cells = "".join(f"{cpu:>8.3f} ({wall:5.2f})" for cpu, wall in least)
            ratio = least[0, 0] / least[1, 0]
            print(f"{dtype:<10}{name:<18}{cells}{ratio:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
