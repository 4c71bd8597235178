"""The least time of the kernels for self-attention, from the compilers' output.

    python benchmarks/self_attention_bounds.py --chips v5e v6e
    python benchmarks/self_attention_bounds.py --chips h200

compiles the kernel for chips that are not there, with the options of plans. It follows the code for
a TPU with the tiles of real batches (`followed_bundles.py`), and counts the instructions for a GPU
(`counted_sass.py`). Each line has

  - least: the time of the bundles that a core executes, with waits for copies; on a GPU that of its
    busiest unit for the blocks of the busiest multiprocessor
  - limit: the time in which the matrix units compute the products of the heads' own sizes
  - share: limit / least, and no more is possible. Stalls and latencies of a chip come on top.

These are bounds, and nothing is measured. Takes `pip install -e ".[dev,tpu]"`, and about half a
minute of a core for each chip and model; for a GPU what `tests/README.md` names.
"""

import argparse
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from attention_bounds import dump_code


class Batch(NamedTuple):
    """Rows of one length, and the heads of a device."""

    num_heads: int
    head_size: int
    num_rows: int
    length: int
    v_head_size: int | None = None  # None: head_size
    causal: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.length

    @property
    def value_size(self) -> int:
        return self.v_head_size or self.head_size


# All of 4096 tokens, so that those of one model have the same program.
MODELS = {
    "MiniLM": (Batch(12, 32, 16, 256), Batch(12, 32, 64, 64)),
    "bge-large": (Batch(16, 64, 8, 512),),
    "a tower of 72": (Batch(16, 72, 1, 4096), Batch(16, 72, 4, 1024)),
    "a tower of 80": (Batch(16, 80, 1, 4096),),
    "DeepSeek V3 over 8": (Batch(16, 192, 1, 4096, 128, True), Batch(16, 192, 4, 1024, 128, True)),
}


def compile_kernel(chip_name: str, batch: Batch) -> None:
    """Compile the attention of a batch for a chip."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding
    from jaxllm_kernels.platform import CHIPS
    from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig
    from jaxllm_kernels.ragged_self_attention.gpu import MosaicSelfAttention
    from jaxllm_kernels.ragged_self_attention.tpu import TpuSelfAttention
    from jaxllm_kernels.topology import topology_devices

    chip = CHIPS[chip_name]
    is_gpu = chip.is_hopper
    sharding = SingleDeviceSharding(topology_devices(chip_name if is_gpu else f"{chip_name}-8")[0])
    op = MosaicSelfAttention.tuned_for(chip) if is_gpu else TpuSelfAttention(chip=chip_name)
    config = SelfAttentionConfig(scale=batch.head_size**-0.5, causal=batch.causal)

    def attend(q, k, v, query_starts):  # noqa: ANN001, ANN202
        return op(q, k, v, query_starts, config)

    heads = [
        jax.ShapeDtypeStruct(
            (batch.num_tokens, batch.num_heads, size), jnp.bfloat16, sharding=sharding
        )
        for size in (batch.head_size, batch.head_size, batch.value_size)
    ]
    starts = jax.ShapeDtypeStruct((65,), jnp.int32, sharding=sharding)
    traced = jax.jit(attend).trace(*heads, starts)
    lowered = traced.lower(lowering_platforms=("cuda" if is_gpu else "tpu",))
    lowered.compile(dict(chip.compiler_options))


def operands_of(batch: Batch, chip_name: str) -> list[Any]:
    """The scalar operands of a batch's kernel, in their order."""
    import numpy as np
    from jaxllm_kernels.platform import CHIPS
    from jaxllm_kernels.ragged_paged_attention.tpu_layout import LANES
    from jaxllm_kernels.ragged_self_attention.tpu_sizes import Heads, choose_sizes

    heads = Heads(batch.num_heads, batch.num_heads, batch.head_size, batch.value_size)
    tile = choose_sizes(batch.num_tokens, heads, "bfloat16", CHIPS[chip_name]).tile
    token = np.arange(batch.num_tokens)
    first = (token - token % batch.length).reshape(-1, tile)
    end = token.reshape(first.shape) + 1 if batch.causal else first + batch.length
    low = first.min(axis=1)
    return [
        low - low % LANES, end.max(axis=1), first.max(axis=1), end.min(axis=1), batch.num_tokens
    ]  # fmt: skip


def show_bound(batch: Batch, chip_name: str, model: str, folder: Path) -> None:
    """Follow the code of a batch's kernel, which was compiled into a folder."""
    from followed_bundles import follow, read_code
    from jaxllm_kernels.platform import CHIPS
    from priced_hlo import CLOCK_MHZ

    chip, clock = CHIPS[chip_name], CLOCK_MHZ[chip_name] * 1e6
    (path,) = folder.glob("*ragged_self_attention*[0-9]-final_bundles.txt")
    outcome = follow(
        read_code(path),
        operands_of(batch, chip_name),
        bytes_per_cycle=chip.hbm_bytes_per_second / clock,
    )
    show(batch, chip_name, model, outcome.cycles / clock)


def show(batch: Batch, chip_name: str, model: str, least: float) -> None:
    """Print a line, of the least seconds of a batch."""
    from jaxllm_kernels.platform import CHIPS

    pairs = batch.num_tokens * batch.length * batch.num_heads / (2 if batch.causal else 1)
    products = 2 * pairs * (batch.head_size + batch.value_size)
    limit = products / CHIPS[chip_name].bf16_flops_per_second
    print(
        f"| {chip_name} | {model} | {batch.num_rows} of {batch.length} | {1e6 * least:.1f} "
        f"| {1e6 * limit:.1f} | {limit / least:.2f} |",
        flush=True,
    )


def show_bounds_of_gpu(chip_name: str, model: str) -> None:
    import numpy as np
    from jaxllm_kernels.platform import CHIPS
    from self_attention_gpu import busiest, instructions_of_score, least_seconds, machine_code

    chip, code = CHIPS[chip_name], machine_code(__file__, "--chips", chip_name, "--models", model)
    masked, whole = instructions_of_score(code, MODELS[model][0].head_size)
    print(f"a score takes {masked:.1f} instructions with masks and {whole:.1f} without")
    for batch in MODELS[model]:
        starts = np.arange(batch.num_rows + 1, dtype=np.int32) * batch.length
        blocks = busiest(starts, batch.num_tokens, batch.num_heads, batch.head_size, chip.num_cores)
        show(batch, chip_name, model, least_seconds(code, blocks, chip))


def show_bounds(chip_name: str, model: str) -> None:
    from jaxllm_kernels.platform import CHIPS

    if CHIPS[chip_name].is_hopper:
        show_bounds_of_gpu(chip_name, model)
        return
    with tempfile.TemporaryDirectory() as folder:
        dump_code(folder, __file__, "--chips", chip_name, "--models", model)
        for batch in MODELS[model]:
            show_bound(batch, chip_name, model, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--chips", nargs="+", choices=["v5e", "v6e", "h200"], default=["v5e", "v6e"]
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--only-compile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if args.only_compile:
        compile_kernel(args.chips[0], MODELS[args.models[0]][0])
        return
    print("| chip | model | rows | least, us | limit, us | share |")
    print("|---|---|---|---|---|---|")
    for chip_name, model in itertools.product(args.chips, args.models):
        show_bounds(chip_name, model)


if __name__ == "__main__":
    main()
