"""Products of rows with a weight on a CPU: XLA's and our own kernel, alternating.

    python benchmarks/dense.py

Ten weights are multiplied one after another, so that none is in a cache. The minimum of several
runs counts, because other programs on the machine only add to it.
"""

import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxllm_kernels.dense.api import XLA
from jaxllm_kernels.dense.native import NativeMatmul
from jaxllm_kernels.native import library

NUM_OUTPUTS, NUM_INPUTS, NUM_WEIGHTS, REPETITIONS = 5632, 1024, 10, 12


def seconds(matmul, x, weights) -> float:
    """The time of one product."""

    @jax.jit
    def run(x, weights):
        outputs = []
        for weight in weights:
            y = matmul(x, weight)
            outputs.append(y.sum())
            x = x + (y[:, :1] * 0).astype(x.dtype)  # the next product depends on this one
        return outputs

    jax.block_until_ready(run(x, weights))
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        jax.block_until_ready(run(x, weights))
        times.append(time.perf_counter() - start)
    return min(times) / len(weights)


def main() -> None:
    loaded = library.load(Path(tempfile.mkdtemp()))
    if isinstance(loaded, library.NoLibrary):
        sys.exit(loaded.reason)
    ours = NativeMatmul(loaded)
    print(f"[rows, {NUM_INPUTS}] x [{NUM_INPUTS}, {NUM_OUTPUTS}], us per product")
    print(f"{'type':<10}{'rows':>6}{'XLA':>9}{'native':>9}{'ratio':>8}{'GB/s':>8}")
    for dtype in (jnp.bfloat16, jnp.float32):
        keys = jax.random.split(jax.random.key(0), NUM_WEIGHTS)
        weights = [jax.random.normal(k, (NUM_OUTPUTS, NUM_INPUTS), dtype) for k in keys]
        for num_rows in (2, 4, 8, 16, 32, 64, 128, 256, 512):
            if num_rows > ours.max_rows(dtype):
                break
            x = jax.random.normal(jax.random.key(1), (num_rows, NUM_INPUTS), dtype)
            xla, own = (seconds(matmul, x, weights) for matmul in (XLA, ours))
            print(
                f"{jnp.dtype(dtype).name:<10}{num_rows:>6}{1e6 * xla:>9.0f}{1e6 * own:>9.0f}"
                f"{xla / own:>8.2f}{weights[0].nbytes / own / 1e9:>8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
