"""Products of rows with a weight on a CPU, by stored form: XLA's and our own kernels, alternating.

    python benchmarks/dense.py
    python benchmarks/dense.py --forms bfloat16,int8/128,int4/32 --rows 1,16

A form is a dtype, or codes with the inputs that share a scale (0: all). Weights of 0.3 GB are
multiplied one after another, so that none is in a cache. The minimum of several runs counts, since
other programs on the machine only add to it. The last column is the share of the bandwidth of plain
reads by all cores, measured between the runs.
"""

import argparse
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxllm_kernels.coded import CodedWeight, CodeForm
from jaxllm_kernels.coded_cases import random_weight
from jaxllm_kernels.dense.api import XLA, XLA_CODED
from jaxllm_kernels.dense.native import NativeCodedMatmul, NativeMatmul
from jaxllm_kernels.native import library
from latency import read_bandwidth

NUM_OUTPUTS, NUM_INPUTS, NUM_BYTES, REPETITIONS = 5632, 1024, 300e6, 7
FORMS = (
    "bfloat16,float32,int8/0,int8/128,int8/32,float8_e4m3fn/128,int4/128,int4/32,float4_e2m1fn/32"
)


class Run:
    """A compiled program of products with all weights, and its shortest time."""

    def __init__(self, matmul, x, weights):
        @jax.jit
        def run(x, weights):
            outputs = []
            for weight in weights:
                y = matmul(x, weight)
                outputs.append(y.sum())
                x = x + (y[:, :1] * 0).astype(x.dtype)  # the next product depends on this one
            return outputs

        self.run = lambda: jax.block_until_ready(run(x, weights))
        self.run()
        self.seconds = float("inf")

    def again(self) -> None:
        start = time.perf_counter()
        self.run()
        self.seconds = min(self.seconds, time.perf_counter() - start)


def make(form: str, loaded: library.Library):
    """The dtype of rows, weights, and the implementations of their products."""
    codes, _, group = form.partition("/")
    if not group:
        dtype = jnp.dtype(codes)
        one = jax.random.normal(jax.random.key(0), (NUM_OUTPUTS, NUM_INPUTS), dtype)
        implementations = XLA, NativeMatmul(loaded)
    else:
        dtype, native = jnp.dtype("bfloat16"), NativeCodedMatmul(loaded)
        held = native.held(CodeForm(codes=codes, group=int(group) or None), NUM_OUTPUTS, NUM_INPUTS)
        one = random_weight(np.random.default_rng(0), (NUM_OUTPUTS, NUM_INPUTS), held)
        implementations = XLA_CODED, native
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(one))
    weights = [jax.tree.map(jnp.copy, one) for _ in range(int(NUM_BYTES / num_bytes))]
    return dtype, weights, num_bytes, implementations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forms", default=FORMS)
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--no-xla", action="store_true", help="time our own kernels only")
    args = parser.parse_args()
    loaded = library.load(Path(tempfile.gettempdir()) / "jaxllm-benchmark-kernels")
    if isinstance(loaded, library.NoLibrary):
        raise SystemExit(loaded.reason)
    print(f"[rows, {NUM_INPUTS}] x [{NUM_INPUTS}, {NUM_OUTPUTS}], us per product")
    print(f"{'form':<20}{'rows':>6}{'XLA':>9}{'native':>9}{'ratio':>8}{'GB/s':>8}{'of reads':>9}")
    for form in args.forms.split(","):
        dtype, weights, num_bytes, implementations = make(form, loaded)
        assert all(isinstance(w, jax.Array | CodedWeight) for w in weights)
        for num_rows in map(int, args.rows.split(",")):
            x = jax.random.normal(jax.random.key(1), (num_rows, NUM_INPUTS), dtype)
            runs = [Run(its, x, weights) for its in implementations[args.no_xla :]]
            reads = 0.0
            for _ in range(REPETITIONS):
                reads = max(reads, read_bandwidth())
                for run in runs:
                    run.again()
            xla, own = runs[0].seconds / len(weights), runs[-1].seconds / len(weights)
            rate = num_bytes / own
            print(
                f"{form:<20}{num_rows:>6}{1e6 * xla:>9.0f}{1e6 * own:>9.0f}{xla / own:>8.2f}"
                f"{rate / 1e9:>8.1f}{rate / reads:>9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
