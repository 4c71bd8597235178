"""The least time of the TPU attention kernels for some batches, from the compiler's output.

    python benchmarks/attention_bounds.py --chips v5e v6e v7x

compiles the kernels for chips that are not there, with the options of plans, and follows their code
with the worklists of real batches (`followed_bundles.py`). Each line has

  - code: the bundles that a core executes, at its clock
  - limit: the time in which the needed bytes load, or in which the matrix units compute the
    products that a causal prefill needs
  - least: code with waits for copies, which are served one after another at full bandwidth
  - share: limit / least, and no more is possible. Stalls and latencies of a chip come on top.

These are bounds, and nothing is measured. Takes `pip install -e ".[dev,tpu]"`, and
about half a minute of a core for each chip and shape.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

FLAGS = {
    "xla_jf_dump_llo_text": "true",
    "xla_jf_dump_llo_pass_label_regex": ".*final_bundles.*",
}
# Query heads and kv heads of a device; all of size 128.
SHAPES = {
    "8b": (32, 8),
    "8b on 2": (16, 4),
    "70b on 4": (16, 2),
    "70b on 8": (8, 1),
}
HEAD_SIZE, BLOCK_SIZE, NUM_ROWS, NUM_TOKENS, MAX_BLOCKS = 128, 64, 64, 2048, 256
BYTES = 2  # of bfloat16


class Batch(NamedTuple):
    """Rows of one length."""

    kernel: str  # decode, short or prefill
    num_rows: int
    num_tokens: int  # of a row
    context: int  # with its tokens

    def __str__(self) -> str:
        return f"{self.num_rows} x {self.num_tokens} of {self.context}"


BATCHES = (
    *(Batch("decode", 64, 1, context) for context in (128, 1000, 1024, 8192)),
    *(Batch("short", 64, 4, context) for context in (1000, 8192)),
    *(Batch("prefill", 1, 2048, context) for context in (2048, 8192)),
)


class Bound(NamedTuple):
    chip: str
    shape: str
    kernel: str
    batch: str
    code_us: float
    limit_us: float
    least_us: float
    share: float
    limited_by: str


def compile_kernels(chip_name: str, shape: str) -> None:
    """Compile a step of decodes and a mixed step for a chip."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding
    from jaxllm_kernels.platform import CHIPS
    from jaxllm_kernels.topology import topology_devices

    backend, config = make_backend(chip_name, shape)
    sharding = SingleDeviceSharding(topology_devices(f"{chip_name}-8")[0])

    def array(dims: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    num_heads, num_kv_heads = SHAPES[shape]
    cache = backend.cache_shape(config, num_blocks=2048, block_size=BLOCK_SIZE, dtype="bfloat16")

    for decode_only, num_tokens in ((True, NUM_ROWS), (False, NUM_TOKENS)):

        def attend(q, k, v, cache, batch, num_tokens=num_tokens):  # noqa: ANN001, ANN202
            prepared = backend.prepare(batch, (config,), num_tokens=num_tokens)
            return backend.attend(q, k, v, cache, batch, prepared, config=config)

        batch = make_batch(
            array((NUM_ROWS + 1,), jnp.int32),
            array((NUM_ROWS,), jnp.int32),
            array((NUM_ROWS, MAX_BLOCKS), jnp.int32),
            array((), jnp.int32),
            array((), jnp.int32),
            decode_only=decode_only,
        )
        q, k, v = (
            array((num_tokens, heads, HEAD_SIZE), jnp.bfloat16)
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        )
        step = jax.jit(attend, donate_argnums=3)
        lowered = step.lower(q, k, v, array(cache.shape, cache.dtype), batch)
        lowered.compile(dict(CHIPS[chip_name].compiler_options))


def make_backend(chip_name: str, shape: str) -> tuple[Any, Any]:
    from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig
    from jaxllm_kernels.ragged_paged_attention.tpu import TpuBackend

    num_heads, num_kv_heads = SHAPES[shape]
    config = AttentionConfig(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=HEAD_SIZE, scale=0.1
    )
    return TpuBackend(chip=chip_name), config


def make_batch(
    query_starts: Any,
    context_lens: Any,
    block_tables: Any,
    num_decodes: Any,
    num_short: Any,
    *,
    decode_only: bool,
) -> Any:
    from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch

    return RaggedBatch(
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=block_tables,
        num_decodes=num_decodes,
        num_short=num_short,
        block_size=BLOCK_SIZE,
        decode_only=decode_only,
    )


def operands_of(batch: Batch, chip_name: str, shape: str) -> list[Any]:
    """The scalar operands of a batch's kernel, in their order."""
    import jax.numpy as jnp
    import numpy as np

    backend, config = make_backend(chip_name, shape)
    rows = np.arange(NUM_ROWS + 1)
    ragged = make_batch(
        jnp.array(np.minimum(rows, batch.num_rows) * batch.num_tokens, jnp.int32),
        jnp.array(np.where(rows[:-1] < batch.num_rows, batch.context, 0), jnp.int32),
        jnp.arange(NUM_ROWS * MAX_BLOCKS, dtype=jnp.int32).reshape(NUM_ROWS, MAX_BLOCKS),
        jnp.int32(batch.num_rows if batch.kernel == "decode" else 0),
        jnp.int32(batch.num_rows if batch.kernel == "short" else 0),
        decode_only=batch.kernel == "decode",
    )
    num_tokens = NUM_ROWS if batch.kernel == "decode" else NUM_TOKENS
    prepared = backend.prepare(ragged, (config,), num_tokens=num_tokens)
    (work,) = getattr(prepared, batch.kernel).values()
    if batch.kernel == "short":
        *arrays, num_decodes = (np.asarray(x) for x in work.work if x is not None)
        return [int(work.num_steps), *arrays, int(num_decodes[0])]
    return [np.asarray(x) for x in work if x is not None]


def bound_of(batch: Batch, chip_name: str, shape: str, folder: Path) -> Bound:
    """Follow the code of a batch's kernel, which was compiled into a folder."""
    from followed_bundles import follow, read_code
    from jaxllm_kernels.platform import CHIPS
    from priced_hlo import CLOCK_MHZ

    chip, clock = CHIPS[chip_name], CLOCK_MHZ[chip_name] * 1e6
    (path,) = folder.glob(f"*ragged_paged_attention_{batch.kernel}*[0-9]-final_bundles.txt")
    outcome = follow(
        read_code(path),
        operands_of(batch, chip_name, shape),
        bytes_per_cycle=chip.hbm_bytes_per_second / clock,
    )
    num_heads, num_kv_heads = SHAPES[shape]
    if batch.kernel == "prefill":
        last = batch.context
        pairs = sum(range(last - batch.num_tokens + 1, last + 1))
        limit = 4 * pairs * num_heads * HEAD_SIZE / chip.bf16_flops_per_second
        limited_by = "code" if outcome.bundles > 0.99 * outcome.cycles else "code and copies"
    else:
        num_bytes = batch.num_rows * batch.context * num_kv_heads * 2 * HEAD_SIZE * BYTES
        limit = num_bytes / chip.hbm_bytes_per_second
        limited_by = "code" if outcome.bundles / clock > limit else "memory"
    least = outcome.cycles / clock
    return Bound(
        chip_name,
        shape,
        batch.kernel,
        str(batch),
        round(1e6 * outcome.bundles / clock, 1),
        round(1e6 * limit, 1),
        round(1e6 * least, 1),
        round(limit / least, 2),
        limited_by,
    )


def dump_code(folder: str, script: str, *arguments: str) -> None:
    """Let a script compile for a chip, and the compiler write the code of kernels into a folder.
    The compiler reads its flags once, so the script has its own process."""
    flags = FLAGS | {"xla_jf_dump_to": folder}
    subprocess.run(
        [sys.executable, script, "--only-compile", *arguments],
        env=os.environ
        | {
            "LIBTPU_INIT_ARGS": " ".join(f"--{name}={value}" for name, value in flags.items()),
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        },
        check=True,
        stderr=subprocess.DEVNULL,
    )


def bounds_of(chip_name: str, shape: str) -> list[Bound]:
    """The bounds of all batches."""
    with tempfile.TemporaryDirectory() as folder:
        dump_code(folder, __file__, "--chips", chip_name, "--shapes", shape)
        return [bound_of(batch, chip_name, shape, Path(folder)) for batch in BATCHES]


def show(bound: Bound) -> None:
    print(
        f"| {bound.chip} | {bound.shape} | {bound.kernel} | {bound.batch} | {bound.code_us:,} "
        f"| {bound.limit_us:,} | {bound.least_us:,} | {bound.share:.2f} | {bound.limited_by} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", nargs="+", default=["v5e", "v6e", "v7x"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--json", action="store_true", help="print one JSON object a line instead")
    parser.add_argument("--only-compile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if args.only_compile:
        compile_kernels(args.chips[0], args.shapes[0])
        return
    if not args.json:
        print("| chip | shape | kernel | rows | code, us | limit, us | least, us | share | by |")
        print("|---|---|---|---|---|---|---|---|---|")
    for chip_name in args.chips:
        for shape in args.shapes:
            for bound in bounds_of(chip_name, shape):
                print(json.dumps(bound._asdict())) if args.json else show(bound)


if __name__ == "__main__":
    main()
