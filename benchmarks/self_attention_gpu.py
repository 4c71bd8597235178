"""The least time of the GPU kernel for self-attention: see `self_attention_bounds.py`."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from counted_sass import Cycles, matrix_loops
from jaxllm_kernels.platform import Chip

# Of a multiprocessor's tensor cores, in 16 bits.
FLOPS_PER_CYCLE = 4096


class Blocks(NamedTuple):
    """How many blocks the warpgroups of the busiest thread block compute."""

    masked: int
    whole: int


def machine_code(script: str, *arguments: str) -> str:
    """The code of the kernels that a script compiles. The compiler prints it."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or []) if spec else []
    tools = [path.parent for folder in folders for path in Path(folder).glob("*/bin/nvdisasm")]
    if not tools:
        raise SystemExit("h200 needs nvidia-cuda-nvcc, nvidia-nvvm and nvidia-cuda-nvdisasm")
    path = os.pathsep.join([*map(str, tools), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, script, "--only-compile", *arguments],
        env=os.environ | {"PATH": path, "MOSAIC_GPU_DUMP_SASS": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


def busiest(
    query_starts: Any, num_tokens: int, num_heads: int, head_size: int, num_workers: int
) -> Blocks:
    """Count the blocks of the batch with these rows that the busiest thread block computes."""
    from jaxllm_kernels.ragged_paged_attention.gpu_worklist import item_of_worker
    from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig
    from jaxllm_kernels.ragged_self_attention.gpu_tiles import choose_sizes, cut_tiles

    block_tokens = choose_sizes(head_size).block_tokens
    config = SelfAttentionConfig(scale=1.0)
    tiles = cut_tiles(query_starts, None, num_tokens, config, block_tokens)
    begin, whole, masked, stop = (
        np.asarray(x).sum(axis=1) for x in (tiles.begin, tiles.whole, tiles.masked, tiles.stop)
    )
    num_items = len(begin) * num_heads
    of_workers = []
    for worker in range(num_workers):
        turns = np.arange(-(-num_items // num_workers), dtype=np.int32)
        items = np.asarray(item_of_worker(worker, turns, num_workers))
        tile = items[items < num_items] // num_heads
        num_whole = int((masked - whole)[tile].sum())
        of_workers.append(Blocks(int((stop - begin)[tile].sum()) - num_whole, num_whole))
    return max(of_workers, key=sum)


def instructions_of_score(code: str, head_size: int) -> tuple[float, float]:
    """The instructions of a thread for each score, in blocks with masks and without."""
    from jaxllm_kernels.ragged_self_attention.gpu_tiles import GROUP_TOKENS, choose_sizes

    masked, whole, _ = matrix_loops(code)
    scores_of_thread = GROUP_TOKENS * choose_sizes(head_size).block_tokens / 128
    return masked.issue / scores_of_thread, whole.issue / scores_of_thread


def least_seconds(code: str, blocks: Blocks, chip: Chip) -> float:
    """The time in which a multiprocessor issues the loops over blocks, and its units compute them.
    What items take beside their blocks, and latencies, come on top."""
    masked, whole, _ = matrix_loops(code)
    cycles: Cycles = masked.times(blocks.masked).plus(whole.times(blocks.whole))
    # The clock at which the chip has its peak.
    clock = chip.bf16_flops_per_second / (chip.num_cores * FLOPS_PER_CYCLE)
    return max(cycles) / clock
