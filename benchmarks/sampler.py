"""The sampler alone: milliseconds of a step's rows, for each layout on this device.

    python benchmarks/sampler.py [--rows 1 8 64] [--vocab-size 151936]

Every layout chooses the same tokens and runs everywhere; the first of the table is this platform's.
The layouts alternate, and the best of several runs counts.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxllm_kernels.native.library import NoLibrary, load
from jaxllm_kernels.sampler.native import NativeSampler

from jaxllm.config import DEFAULT_COMPILATION_CACHE_DIR
from jaxllm.sampling import row_params
from jaxllm.sampling.layout import LAYOUTS, Layout, with_op
from jaxllm.sampling.sampler import sample
from jaxllm.sampling.slot_state import SlotState
from jaxllm.sampling_params import SamplingParams

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95),
    "top-k, top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    "penalty": SamplingParams(temperature=0, repetition_penalty=1.1),
    "5 logprobs": SamplingParams(temperature=0, logprobs=5),
    "20 logprobs": SamplingParams(temperature=0, logprobs=20),
    "grammar": SamplingParams(temperature=0.8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layouts", type=int, help="only so many (default: all)")
    args = parser.parse_args()

    here = jax.default_backend()
    layouts = _own(here) | {here: LAYOUTS[here]} | LAYOUTS
    names = list(layouts)[: args.layouts]
    print(f"{'rows':>5} {'':<14}" + "".join(f"{name:>9}" for name in names) + "  ms")
    for num_rows in args.rows:
        runs = {name: _runner(layouts[name], num_rows, args.vocab_size) for name in names}
        for kind in KINDS:
            best = dict.fromkeys(names, float("inf"))
            for turn in range(1 + args.rounds):
                for name in names:
                    seconds = runs[name](kind)
                    if turn:  # the first run is slower
                        best[name] = min(best[name], seconds)
            times = "".join(f"{1e3 * best[name]:>9.2f}" for name in names)
            print(f"{num_rows:>5} {kind:<14}{times}", flush=True)


def _own(platform: str) -> dict[str, Layout]:
    """The layout with the native sampler, where there is one."""
    if platform != "cpu":
        return {}
    library = load(Path(DEFAULT_COMPILATION_CACHE_DIR).expanduser() / "native", ("float32",))
    if isinstance(library, NoLibrary):
        print(f"no native sampler: {library.reason}")
        return {}
    return {"native": with_op(LAYOUTS["cpu"], NativeSampler.load(library))}


def _runner(layout: Layout, num_rows: int, vocab_size: int) -> Callable[[str], float]:
    """A function that times one step of a kind of rows."""

    def step(state: SlotState, logits: jax.Array, packed: jax.Array, rows: jax.Array, masks=None):
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
            masks=masks,
        )
        return out.state, (out.tokens, out.is_valid, out.logprobs)

    program = jax.jit(step, donate_argnums=0)
    tables = SlotState.abstract(num_rows, vocab_size, 8192)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tables)
    logits = 3 * jax.random.normal(jax.random.key(0), (num_rows, vocab_size))
    rows = jnp.arange(num_rows)
    # Every third token.
    masks = jnp.full((num_rows, -(-vocab_size // 32)), 0x49249249, jnp.uint32)

    def run(kind: str) -> float:
        nonlocal state
        columns = [row_params.encode(KINDS[kind], seed) for seed in range(num_rows)]
        packed = jax.block_until_ready(jnp.asarray(np.stack(columns)))
        start = time.perf_counter()
        state, out = program(state, logits, packed, rows, *[masks] * (kind == "grammar"))
        jax.block_until_ready(out)
        return time.perf_counter() - start

    return run


if __name__ == "__main__":
    main()
