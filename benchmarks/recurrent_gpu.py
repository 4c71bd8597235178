"""A recurrent op of one layer, compiled for an H200 that need not be there: launches, temporaries.

    python benchmarks/recurrent_gpu.py delta --by xla --tokens 64
    python benchmarks/recurrent_gpu.py ssd --by mosaic_sm90 --tokens 64

Sizes are those of Qwen3.6-35B-A3B (delta rule and its convolution) and Nemotron 3 Nano (Mamba2),
for 64 rows. 64 tokens are a decode, more are a mixed step. It needs JAX 0.11.2 and its CUDA plugin.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxllm_kernels.causal_conv.xla import XlaConv
from jaxllm_kernels.gated_delta.gpu import MosaicDelta
from jaxllm_kernels.gated_delta.xla import XlaDelta
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
from jaxllm_kernels.recurrent.rows import prepare_rows
from jaxllm_kernels.ssd.gpu import MosaicSsd
from jaxllm_kernels.ssd.xla import XlaSsd
from jaxllm_kernels.topology import topology_devices

from jaxllm.programs.launches import Launch, all_launches, read_listing

CHIP = CHIPS["h200"]
NUM_ROWS, NUM_SLOTS = 64, 96
OPS = {
    ("delta", "xla"): XlaDelta().tuned_for,
    ("delta", "mosaic_sm90"): MosaicDelta.tuned_for,
    ("ssd", "xla"): XlaSsd().tuned_for,
    ("ssd", "mosaic_sm90"): MosaicSsd.tuned_for,
    ("conv", "xla"): lambda chip: XlaConv(),
}
BF16, F32 = jnp.bfloat16, jnp.float32


def shapes(op: str, tokens: int) -> tuple[list[tuple[Any, Any]], tuple[Any, Any]]:
    """The shapes and types of the operands, and of the states."""
    if op == "delta":
        keys, heads = (tokens, 16, 128), (tokens, 32)
        operands = [(keys, F32), (keys, F32), ((*heads, 128), BF16), (heads, F32), (heads, F32)]
        return operands, ((NUM_SLOTS, 32, 128, 128), F32)
    if op == "ssd":
        heads, of_group = (tokens, 64), ((tokens, 8, 128), BF16)
        operands = [((*heads, 64), BF16), of_group, of_group, (heads, F32), ((64,), F32)]
        return operands, ((NUM_SLOTS, 64, 64, 128), F32)
    return [((tokens, 8192), BF16), ((4, 8192), BF16)], ((NUM_SLOTS, 3, 8192), jnp.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("op", choices=["delta", "ssd", "conv"])
    parser.add_argument("--by", choices=["xla", "mosaic_sm90"], default="xla")
    parser.add_argument("--tokens", type=int, default=NUM_ROWS)
    args = parser.parse_args()
    op = OPS[args.op, args.by](CHIP)
    mesh = Mesh(np.array(topology_devices("h200")), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def array(shape: Any, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def run(operands, state, slots, query_starts, context_lens, num_decodes):
        batch = RaggedBatch(
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=jnp.zeros((NUM_ROWS, 0), jnp.int32),
            num_decodes=num_decodes,
            block_size=1,
            decode_only=args.tokens <= NUM_ROWS,
        )
        rows = prepare_rows(batch, slots, num_tokens=args.tokens, num_slots=NUM_SLOTS)
        if args.op == "conv":
            return op(*operands, None, state, rows, activation="silu")
        return op(*operands, state, rows)

    operands, state = shapes(args.op, args.tokens)
    counts = map(array, ((NUM_ROWS,), (NUM_ROWS + 1,), (NUM_ROWS,), ()))
    traced: Any = jax.jit(run, donate_argnums=1).trace(
        [array(*operand) for operand in operands], array(*state), *counts
    )
    options = dict((*CHIP.compiler_options, *CHIP.step_options(args.tokens)))
    with tempfile.TemporaryDirectory() as folder:
        lowered = traced.lower(lowering_platforms=("cuda",))
        compiled = lowered.compile({**options, "xla_dump_to": folder})
        launches = read_listing(Path(folder))
    memory = compiled.memory_analysis()
    print(f"temporaries {memory.temp_size_in_bytes / 2**20:.2f} MiB, of states in place "
          f"{memory.alias_size_in_bytes / 2**20:.1f} MiB")  # fmt: skip
    print_launches(launches)


def print_launches(launches: list[Launch], depth: int = 0) -> None:
    """Print them as a tree: under a loop stands what a pass of it launches."""
    for launch in launches:
        inside = len([*all_launches(x for branch in launch.branches for x in branch)])
        count = f" of {inside}" if inside else ""
        print("  " * depth + f"{launch.kind} {launch.name}{count}")
        for branch in launch.branches:
            print_launches(branch, depth + 1)


if __name__ == "__main__":
    main()
