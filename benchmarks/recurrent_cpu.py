"""A recurrent op of one layer on CPUs, in C++ and in XLA's form: milliseconds of processor time.

    python benchmarks/recurrent_cpu.py                               (prompts of 512 tokens)
    python benchmarks/recurrent_cpu.py --tokens 64 --rows 64         (64 decodes)

The two forms take turns, each with states of its own. The delta rule has 16 heads of 128 x 128, as
in the recurrent shape of `side_by_side.py`, and decays per head or per channel. Mamba2 has the
heads of Nemotron 3 Nano, 64 of 64 x 128 in 8 groups, or 48 in one group. All rows have the same
number of tokens.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxllm_kernels.gated_delta.cases import Layer as DeltaLayer
from jaxllm_kernels.gated_delta.cases import draw as draw_delta
from jaxllm_kernels.gated_delta.native import NativeDelta
from jaxllm_kernels.gated_delta.xla import XlaDelta
from jaxllm_kernels.native.library import Library, load
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
from jaxllm_kernels.recurrent.rows import StateRows, prepare_rows
from jaxllm_kernels.ssd.cases import Layer as SsdLayer
from jaxllm_kernels.ssd.cases import draw as draw_ssd
from jaxllm_kernels.ssd.native import NativeSsd
from jaxllm_kernels.ssd.xla import XlaSsd

SQUARE = DeltaLayer(num_key_heads=16, num_heads=16, key_size=128, value_size=128)
LAYERS: dict[str, DeltaLayer | SsdLayer] = {
    "delta rule, 16 heads of 128 x 128": SQUARE,
    "the same, decays per channel": dataclasses.replace(SQUARE, decays_by_channel=True),
    "Mamba2, 48 heads of 64 x 128 in one group": SsdLayer(
        num_groups=1, num_heads=48, head_size=64, state_size=128
    ),
    "Mamba2, 64 heads of 64 x 128 in 8 groups": SsdLayer(
        num_groups=8, num_heads=64, head_size=64, state_size=128
    ),
}


def make_rows(num_tokens: int, num_rows: int) -> StateRows:
    """Rows that go on from a state, with an equal share of the tokens each."""
    length = num_tokens // num_rows
    is_decode = length == 1
    batch = RaggedBatch(
        query_starts=jnp.arange(num_rows + 1, dtype=jnp.int32) * length,
        context_lens=jnp.full(num_rows, length + 1, jnp.int32),
        block_tables=jnp.zeros((num_rows, 0), jnp.int32),
        num_decodes=jnp.int32(num_rows if is_decode else 0),
        block_size=1,
        decode_only=is_decode,
    )
    return prepare_rows(batch, jnp.arange(num_rows), num_tokens=num_tokens, num_slots=num_rows)


def milliseconds(layer: DeltaLayer | SsdLayer, library: Library, args: Any) -> dict[str, float]:
    """The median of calls, by the op's name."""
    random = np.random.default_rng(0)
    if isinstance(layer, DeltaLayer):
        operands = draw_delta(layer, random, args.tokens)
        shape = (layer.num_heads, layer.key_size, layer.value_size)
        ops: list[Any] = [NativeDelta.load(library), XlaDelta()]
    else:
        operands = (*draw_ssd(layer, random, args.tokens), layer.rate)
        shape = (layer.num_heads, layer.head_size, layer.state_size)
        ops = [NativeSsd.load(library), XlaSsd()]
    operands, rows = jax.device_put(operands), make_rows(args.tokens, args.rows)
    calls = {op.name: jax.jit(op, donate_argnums=len(operands)) for op in ops}
    states = {name: jnp.zeros((args.rows, *shape)) for name in calls}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(1 + args.repetitions):
        for name, call in calls.items():
            jax.block_until_ready(states)
            start = time.process_time()
            _, states[name] = jax.block_until_ready(call(*operands, states[name], rows))
            if repetition > 0:  # the first one compiles
                times[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(of_op) for name, of_op in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512, help="tokens of all rows")
    parser.add_argument("--rows", type=int, default=1, help="rows of the step")
    parser.add_argument("--repetitions", type=int, default=15, help="calls of each form")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        library = load(Path(directory))
        if not isinstance(library, Library):
            raise SystemExit(library.reason)
        for name, layer in LAYERS.items():
            medians = milliseconds(layer, library, args)
            times = ", ".join(f"{op} {time:.2f} ms" for op, time in medians.items())
            ratio = medians["xla"] / medians["native"]
            print(f"{name}: {times}, ratio {ratio:.1f}", flush=True)


if __name__ == "__main__":
    main()
