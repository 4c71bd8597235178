"""A recurrent op of one layer, compiled for a TPU that need not be there: what its tiles take.

    python benchmarks/recurrent_tpu.py delta --by xla --chip v6e
    python benchmarks/recurrent_tpu.py delta --by tpu --chip v6e

Sizes are those of Qwen3.6-35B-A3B (delta), of the same with decays per channel (kda), of Nemotron 3
Nano (ssd), and of Granite 4.0 H Tiny (granite), for a prompt of 2048 tokens in a step of 64 rows.
It prints what a pass of each loop launches, with the compiler's estimates of cycles, and the
bundles of the kernel for tiles with the least time that they take, without waits for copies. These
are no measurements.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from attention_bounds import dump_code
from priced_hlo import CLOCK_MHZ, operations

# What a loop's estimate says if its number of passes is not known.
_UNKNOWN = 1 << 60
NUM_ROWS, NUM_SLOTS, NUM_TOKENS = 64, 96, 2048
# Heads of a layer, and how many of them the kernel for tiles computes side by side.
HEADS = {"delta": (32, 4), "kda": (32, 4), "ssd": (64, 8), "granite": (48, 8)}
# The ops of Mamba2, with their groups of heads.
GROUPS = {"ssd": 8, "granite": 1}


def compile_op(op: str, by: str, chip_name: str) -> Any:
    """Compile an op for a chip."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding
    from jaxllm_kernels.gated_delta.tpu import TpuDelta
    from jaxllm_kernels.gated_delta.xla import XlaDelta
    from jaxllm_kernels.platform import CHIPS
    from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
    from jaxllm_kernels.recurrent.rows import prepare_rows
    from jaxllm_kernels.ssd.tpu import TpuSsd
    from jaxllm_kernels.ssd.xla import XlaSsd
    from jaxllm_kernels.topology import topology_devices

    chip = CHIPS[chip_name]
    if by == "xla":
        chosen: Any = (XlaSsd() if op in GROUPS else XlaDelta()).tuned_for(chip)
    else:
        chosen = (TpuSsd if op in GROUPS else TpuDelta)(chip=chip_name)
    sharding = SingleDeviceSharding(topology_devices(f"{chip_name}-8")[0])

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def run(operands, state, slots, query_starts, context_lens, num_decodes):  # noqa: ANN001, ANN202
        batch = RaggedBatch(
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=jnp.zeros((NUM_ROWS, 0), jnp.int32),
            num_decodes=num_decodes,
            block_size=1,
            decode_only=False,
        )
        rows = prepare_rows(batch, slots, num_tokens=NUM_TOKENS, num_slots=NUM_SLOTS)
        if op not in GROUPS:
            return chosen(*operands, state=state, rows=rows)
        # Layers have no heads beside the op, but rows of numbers.
        sizes = (64, 128, 128)
        xbc = (x.reshape(NUM_TOKENS, -1, size) for x, size in zip(operands[:3], sizes, strict=True))
        out, state = chosen(*xbc, *operands[3:], state=state, rows=rows)
        return out.reshape(NUM_TOKENS, -1), state

    bf16, num_heads = jnp.bfloat16, HEADS[op][0]
    if op in GROUPS:
        of_groups = array(NUM_TOKENS, GROUPS[op] * 128, dtype=bf16)
        operands = [array(NUM_TOKENS, num_heads * 64, dtype=bf16), of_groups, of_groups]
        operands += [array(NUM_TOKENS, num_heads), array(num_heads)]
        state = array(NUM_SLOTS, num_heads, 64, 128)
    else:
        keys = array(NUM_TOKENS, 32 if op == "kda" else 16, 128)
        heads = NUM_TOKENS, num_heads
        decays = array(*heads, 128) if op == "kda" else array(*heads)
        operands = [keys, keys, array(*heads, 128, dtype=bf16), decays, array(*heads)]
        state = array(NUM_SLOTS, num_heads, 128, 128)
    counts = [array(n, dtype=jnp.int32) for n in (NUM_ROWS, NUM_ROWS + 1, NUM_ROWS)]
    lowered = jax.jit(run, donate_argnums=1).lower(operands, state, *counts, array(dtype=jnp.int32))
    return lowered.compile(dict(chip.compiler_options))


def show(hlo: str) -> None:
    """Print the loops of a program, the entry first."""

    def visit(name: str | None, depth: int) -> None:
        of_opcode: dict[str, list[int]] = {}
        launched = list(operations(hlo, name))
        for operation in launched:
            cycles = operation.cycles or 0
            of_opcode.setdefault(operation.opcode, []).append(cycles if cycles < _UNKNOWN else 0)
        total = sum(map(sum, of_opcode.values()))
        text = ", ".join(f"{len(x)} {code} {sum(x)}" for code, x in sorted(of_opcode.items()))
        print("  " * depth + f"{name or 'entry'}: {total} cycles: {text}")
        for operation in launched:
            for body in operation.bodies:
                visit(body, depth + 1)

    visit(None, 0)


def count_tiles(op: str, folder: Path, chip_name: str) -> None:
    """Print what the kernel for tiles takes, if one was compiled into the folder. Its code has a
    loop over tiles, and within it one over heads, several at once."""
    from followed_bundles import read_code

    for path in folder.glob("*_tiles*[0-9]-final_bundles.txt"):
        code = read_code(path)
        sizes = [
            at - code.regions[instruction.arguments[0]]
            for at, bundle in enumerate(code.bundles)
            for instruction in bundle
            if instruction.opcode == "sbr.rel"
        ]
        heads, tile = sorted(sizes)[-2:]
        num_heads, at_once = HEADS[op]
        num_tiles, num_bodies = NUM_TOKENS // 64, num_heads // at_once
        bundles = num_tiles * (tile + (num_bodies - 1) * heads)
        print(
            f"kernel for tiles: {heads} bundles for {at_once} heads, {bundles} in all, "
            f"{bundles / CLOCK_MHZ[chip_name]:.0f} us"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("op", choices=list(HEADS))
    parser.add_argument("--chip", default="v6e")
    parser.add_argument("--by", choices=["xla", "tpu"], default="tpu")
    parser.add_argument("--only-compile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if args.only_compile:
        compiled = compile_op(args.op, args.by, args.chip)
        print(f"temporaries {compiled.memory_analysis().temp_size_in_bytes / 2**20:.1f} MiB")
        show(compiled.as_text())
        return
    with tempfile.TemporaryDirectory() as folder:
        dump_code(folder, __file__, args.op, "--by", args.by, "--chip", args.chip)
        count_tiles(args.op, Path(folder), args.chip)


if __name__ == "__main__":
    main()
