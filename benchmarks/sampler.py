"""The sampler alone: milliseconds of a step's rows, for each layout on this device.

    python benchmarks/sampler.py [--rows 8 64] [--vocab-size 151936]

Every layout chooses the same tokens and runs everywhere; the first of the table is this platform's.
The layouts alternate, and the best of several runs counts.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.sampling import row_params
from jaxllm.sampling.layout import LAYOUTS, Layout
from jaxllm.sampling.sampler import sample
from jaxllm.sampling.slot_state import SlotState
from jaxllm.sampling_params import SamplingParams

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95),
    "top-k, top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    "penalty": SamplingParams(temperature=0, repetition_penalty=1.1),
    "20 logprobs": SamplingParams(temperature=0, logprobs=20),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    here = jax.default_backend()
    names = [here, *(name for name in LAYOUTS if name != here)]
    print(f"{'rows':>5} {'':<14}" + "".join(f"{name:>9}" for name in names) + "  ms")
    for num_rows in args.rows:
        runs = {name: _runner(LAYOUTS[name], num_rows, args.vocab_size) for name in names}
        for kind, params in KINDS.items():
            best = dict.fromkeys(names, float("inf"))
            for turn in range(1 + args.rounds):
                for name in names:
                    seconds = runs[name](params)
                    if turn:  # the first run is slower
                        best[name] = min(best[name], seconds)
            times = "".join(f"{1e3 * best[name]:>9.2f}" for name in names)
            print(f"{num_rows:>5} {kind:<14}{times}", flush=True)


def _runner(layout: Layout, num_rows: int, vocab_size: int) -> Callable[[SamplingParams], float]:
    """A function that times one step."""

    def step(state: SlotState, logits: jax.Array, packed: jax.Array, rows: jax.Array):
        out = sample(
            logits,
            row_params.decode(packed),
            slots=rows,
            samples=rows >= 0,
            output_index=rows,
            positions=rows,
            state=state,
            num_logprobs=20,
            layout=layout,
        )
        return out.state, (out.tokens, out.is_valid, out.logprobs)

    program = jax.jit(step, donate_argnums=0)
    tables = SlotState.abstract(num_rows, vocab_size, 8192)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tables)
    logits = 3 * jax.random.normal(jax.random.key(0), (num_rows, vocab_size))
    rows = jnp.arange(num_rows)

    def run(params: SamplingParams) -> float:
        nonlocal state
        columns = [row_params.encode(params, seed) for seed in range(num_rows)]
        packed = jax.block_until_ready(jnp.asarray(np.stack(columns)))
        start = time.perf_counter()
        state, out = program(state, logits, packed, rows)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    return run


if __name__ == "__main__":
    main()
