"""Bounds of the GPU attention kernels, from a model of their pipelines. It measures nothing.

    python benchmarks/gpu_bounds.py            (a minute on any machine; needs no GPU)

The model computes what an H200 could reach at most with the kernels' worklists and rings, and with
durations that were counted by hand from compiled code (`Durations`). Its worklists are those that
the kernels use.

A decode is simulated: 132 producers request blocks, one memory serves them at equal rates, and
readers release stages. The bound is the time of the bytes alone divided by the simulated time. The
second figure is the most that one multiprocessor had nothing in flight between its first request
and its last, which is zero as long as no ring drains.

A prefill's figure is its balance: the mean load of a worker divided by the largest. The load of an
item is its number of blocks and a constant. Whatever the tensor cores lose comes on top.

Short rows are simulated like decodes. Beside that is the least time that they would take as tiles
of a prefill: the blocks of the worker with the most, at the full rate of the tensor cores.
"""

import argparse
import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxllm_kernels.common import cdiv
from jaxllm_kernels.mla.gpu_tiles import BLOCK, FRONT, Teams
from jaxllm_kernels.mla.gpu_tiles import cut_tiles as cut_latent_tiles
from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig, RaggedBatch
from jaxllm_kernels.ragged_paged_attention.gpu_tuning import (
    PREFILL_TILE_TOKENS,
    default_tuning,
    num_short_parts,
)
from jaxllm_kernels.ragged_paged_attention.gpu_worklist import (
    DecodeSplit,
    cut_prefills,
    item_of_worker,
    list_items,
)

NUM_WORKERS = 132
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 32, 8, 128  # of Llama-3.1-8B
BLOCK_TOKENS, PAGE_TOKENS = 128, 64
LATENT_BYTES, LATENT_STAGES = (512 + 64) * 2, 2  # of DeepSeek-V3
REQUEST, ARRIVAL = 0, 1
BYTES_PER_US = 4.3e6  # of an H200's memory, as measured by others
OPERATIONS_PER_US = 790e6  # of its tensor cores, likewise


def config_of(heads_per_kv_head: int = NUM_HEADS // NUM_KV_HEADS) -> AttentionConfig:
    """A layer with a number of query heads per kv head."""
    num_heads = heads_per_kv_head * NUM_KV_HEADS
    return AttentionConfig(
        num_heads=num_heads, num_kv_heads=NUM_KV_HEADS, head_size=HEAD_SIZE, scale=1.0
    )


NUM_STAGES = default_tuning("decode", config_of()).num_stages


@dataclass(frozen=True, kw_only=True)
class Durations:
    """What the steps of a decode take, in microseconds at 1.755 GHz.

    Those of the reader are counted from the machine code for head size 128: 1.5 cycles for each
    instruction of the warpgroup, 16 for a matrix instruction, 30 for a barrier. The latencies are
    assumed: 300 cycles for a load from L2.
    """

    start: float = 0.2  # until the first load
    memory: float = 0.65  # from a request to its arrival, if nothing is in front of it
    load: float = 0.17  # of an item, or of a block's page numbers, by the producer
    keys: float = 0.25  # product of keys and queries, until the stage is released
    softmax: float = 0.2
    values: float = 0.25  # product with the values, until the stage is released
    zero: float = 0.25  # the end of a last block
    finish: float = 0.3  # write an item's partial result
    queries: float = 0.0  # loaded by the reader, before an item's first block


# By query heads per kv head. Matrix instructions of up to 32 columns take 16 cycles, those of 64
# take 32.
SHORT_DURATIONS = {
    4: Durations(keys=0.23, softmax=0.49, values=0.28, finish=0.4, queries=0.5),
    8: Durations(keys=0.39, softmax=1.13, values=0.49, finish=0.5, queries=0.6),
}


@dataclass(frozen=True, kw_only=True)
class LatentDurations:
    """The same for latent attention with rows of 512 + 64, counted likewise.

    A matrix instruction of 64 columns takes 32 cycles, one of 256 takes 128; both warpgroups use
    the same tensor cores.
    """

    start: float = 0.2
    memory: float = 0.65
    load: float = 0.17
    scores: float = 0.69  # 36 matrix instructions
    softmax: float = 0.27  # until both warpgroups have the weights
    values: float = 0.65  # 4 matrix instructions of each warpgroup, until the stage is released
    zero: float = 0.3  # the end of a last block
    queries: float = 0.9  # read the item and load its queries
    finish: float = 0.5  # normalise the sums, stage and store them


def make_batch(
    rows: list[tuple[int, int]], num_decodes: int = 0, num_short: int = 0
) -> RaggedBatch:
    """A step of rows of (tokens, context)."""
    lengths, contexts = np.array(rows, np.int32).T
    return RaggedBatch(
        query_starts=jnp.asarray(np.concatenate([[0], lengths.cumsum()]), jnp.int32),
        context_lens=jnp.asarray(contexts),
        block_tables=jnp.zeros((len(rows), 1), jnp.int32),
        num_decodes=jnp.int32(num_decodes),
        num_short=jnp.int32(num_short),
        block_size=PAGE_TOKENS,
        decode_only=num_decodes == len(rows),
    )


def decode_items(batch: RaggedBatch, short_parts: int = 1) -> list[list[int]]:
    """For each worker, the numbers of keys of its items."""
    split = DecodeSplit(
        num_kv_heads=NUM_KV_HEADS,
        short_parts=short_parts,
        sliding_window=None,
        block_tokens=BLOCK_TOKENS,
        load_tokens=PAGE_TOKENS,
        num_workers=NUM_WORKERS,
    )
    return [[item.end - item.start for item in items] for items in list_items(batch, split)]


class Copy(NamedTuple):
    """The keys, or the values, of a block."""

    num_bytes: int
    look_up: float  # by the producer, before it waits for a free stage
    before: float  # by the reader, before it waits for this copy
    use: float  # by the reader, until the stage is released
    rest: float  # by the reader, until it waits for the next copy


def list_copies(items: list[int], take: Durations) -> list[Copy]:
    """A worker's copies, in their order."""
    copies = []
    for num_keys in items:
        for first in range(0, num_keys, BLOCK_TOKENS):
            num_tokens = min(BLOCK_TOKENS, num_keys - first)
            num_bytes = cdiv(num_tokens, PAGE_TOKENS) * PAGE_TOKENS * HEAD_SIZE * 2
            loads = take.load * (2 if first == 0 else 1)
            zero = take.zero if num_tokens < BLOCK_TOKENS else 0.0
            finish = take.finish if first + num_tokens == num_keys else 0.0
            queries = take.queries if first == 0 else 0.0
            copies.append(Copy(num_bytes, loads, queries, take.keys, take.softmax))
            copies.append(Copy(num_bytes, 0.0, 0.0, take.values + zero, finish))
    return copies


class Worker:
    """A thread block: its producer and its reader, by the times that are known so far."""

    def __init__(self, copies: list[Copy], take: "Durations | LatentDurations"):
        self.copies = copies
        self.num_requested = 0
        self.num_arrived = 0
        self.producer = take.start + take.load
        self.reader = 0.0
        self.idle = 0.0  # time with nothing in flight, between the first request and the last
        self._requested: list[float] = []
        self._last_arrival = 0.0

    def request(self, free_at: float) -> tuple[float, int]:
        """The time of the next request, for a stage that is free at a time, and its bytes."""
        copy = self.copies[self.num_requested]
        self.producer = max(self.producer + copy.look_up, free_at)
        if self.num_requested == self.num_arrived > 0:
            self.idle += self.producer - self._last_arrival
        self.num_requested += 1
        return self.producer, copy.num_bytes

    def arrive(self, time: float) -> float:
        """The next copy in flight has arrived. Return when its stage is released."""
        copy = self.copies[self.num_arrived]
        self.num_arrived += 1
        self._last_arrival = time
        released = max(self.reader + copy.before, time) + copy.use
        self.reader = released + copy.rest
        return released


class Outcome(NamedTuple):
    """The end of a simulated decode."""

    time: float
    idle: float  # the most that a worker had nothing in flight


def simulate_decode(
    items_of_workers: list[list[int]], take: Durations, num_stages: int = NUM_STAGES
) -> Outcome:
    """Simulate workers with these items, whose ring has keys and values of `num_stages` blocks."""
    return simulate([list_copies(items, take) for items in items_of_workers], take, 2 * num_stages)


def simulate(
    copies_of_workers: list[list[Copy]], take: "Durations | LatentDurations", num_stages: int
) -> Outcome:
    """Simulate the workers and their memory, which serves all that wait for it at equal rates.

    A worker's requests are served one after the other. `served` is what a worker that never ran out
    of requests would have received, in bytes; it grows with the memory's rate divided by the number
    of workers that wait. A request is served when `served` has grown by the bytes of the request.
    """
    workers = [Worker(copies, take) for copies in copies_of_workers if copies]
    events: list[tuple[float, int, int, int]] = []  # time, kind, worker, bytes
    for index, worker in enumerate(workers):
        for _ in range(min(num_stages, len(worker.copies))):
            time, size = worker.request(0.0)
            heapq.heappush(events, (time, REQUEST, index, size))
    waiting = [deque[int]() for _ in workers]
    in_service: list[tuple[float, int]] = []  # the `served` at their ends, worker
    now = served = 0.0
    while events or in_service:
        rate = BYTES_PER_US / max(len(in_service), 1)
        end = now + (in_service[0][0] - served) / rate if in_service else math.inf
        if events and events[0][0] <= end:
            time, kind, index, size = heapq.heappop(events)
            served += (time - now) * rate
            now = time
            if kind == REQUEST:
                waiting[index].append(size)
                if len(waiting[index]) == 1:
                    heapq.heappush(in_service, (served + size, index))
                continue
            worker = workers[index]
            released = worker.arrive(now)
            if worker.num_requested < len(worker.copies):
                time, size = worker.request(released)
                heapq.heappush(events, (time, REQUEST, index, size))
        else:
            served, index = heapq.heappop(in_service)
            now = end
            waiting[index].popleft()
            if waiting[index]:
                heapq.heappush(in_service, (served + waiting[index][0], index))
            heapq.heappush(events, (now + take.memory, ARRIVAL, index, 0))
    return Outcome(max(worker.reader for worker in workers), max(x.idle for x in workers))


class DecodeBound(NamedTuple):
    """What a decode reaches at most."""

    us: float
    of_bandwidth: float
    idle_us: float


def _bound(contexts: list[int], outcome: Outcome) -> DecodeBound:
    num_bytes = sum(contexts) * NUM_KV_HEADS * HEAD_SIZE * 4
    return DecodeBound(outcome.time, num_bytes / BYTES_PER_US / outcome.time, outcome.idle)


def decode_bound(contexts: list[int]) -> DecodeBound:
    """Simulate a decode of rows with these contexts."""
    batch = make_batch([(1, context) for context in contexts], num_decodes=len(contexts))
    return _bound(contexts, simulate_decode(decode_items(batch), Durations()))


def short_bound(rows: list[tuple[int, int]], heads_per_kv_head: int) -> DecodeBound:
    """Simulate short rows of (tokens, context)."""
    config = config_of(heads_per_kv_head)
    items = decode_items(make_batch(rows, num_short=len(rows)), num_short_parts(config))
    num_stages = default_tuning("decode_with_short_rows", config).num_stages
    outcome = simulate_decode(items, SHORT_DURATIONS[heads_per_kv_head], num_stages)
    return _bound([context for _, context in rows], outcome)


def latent_copies(contexts: list[int], num_heads: int, take: LatentDurations) -> list[list[Copy]]:
    """For each worker, its copies in a decode of rows with these contexts."""
    teams = Teams.of(num_heads, NUM_WORKERS)
    assert teams.size == 1, "thread blocks of a team share copies in L2, which is not simulated"
    batch = make_batch([(1, context) for context in contexts], num_decodes=len(contexts))
    tiles = cut_latent_tiles(batch, teams, num_tokens=len(contexts))
    share, start, end = int(tiles.share[0]), np.asarray(tiles.start), np.asarray(tiles.end)
    copies = []
    for team in range(teams.number):
        copies.append([])
        for tile in range(int(tiles.first_tile[team]), int(tiles.last_tile[team])):
            begin = team * share - int(start[tile]) - FRONT
            stop = min((begin + share) * BLOCK, int(end[tile]))
            for first in range(max(begin, 0) * BLOCK, stop, BLOCK):
                num_rows = min(stop - first, BLOCK)
                is_first, is_last = first == max(begin, 0) * BLOCK, first + num_rows == stop
                use = take.scores + take.softmax + take.values
                copies[-1].append(
                    Copy(
                        num_bytes=cdiv(num_rows, PAGE_TOKENS) * PAGE_TOKENS * LATENT_BYTES,
                        look_up=take.load * (2 if is_first else 1),
                        before=take.queries if is_first else 0.0,
                        use=use + (take.zero if num_rows < BLOCK else 0.0),
                        rest=take.finish if is_last else 0.0,
                    )
                )
    return copies


def latent_bound(contexts: list[int], num_heads: int = 16) -> DecodeBound:
    """Simulate a decode of rows with these contexts, with latents of 512 and keys of 64."""
    take = LatentDurations()
    outcome = simulate(latent_copies(contexts, num_heads, take), take, LATENT_STAGES)
    num_bytes = sum(contexts) * LATENT_BYTES
    return DecodeBound(outcome.time, num_bytes / BYTES_PER_US / outcome.time, outcome.idle)


def _tile_blocks(rows: list[tuple[int, int]], num_heads: int) -> np.ndarray:
    """The blocks of each item of each worker of a prefill; 0 for no item."""
    num_tokens = sum(tokens for tokens, _ in rows)
    tiles = cut_prefills(make_batch(rows), num_tokens=num_tokens, tile_tokens=PREFILL_TILE_TOKENS)
    num_items = int(tiles.num_tiles[0]) * num_heads
    blocks = np.asarray((tiles.position + tiles.num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS)
    turns = np.arange(cdiv(num_items, NUM_WORKERS), dtype=np.int32)
    items = np.asarray(
        item_of_worker(np.arange(NUM_WORKERS, dtype=np.int32)[:, None], turns, NUM_WORKERS)
    )
    of_items = blocks[np.minimum(items // num_heads, len(blocks) - 1)]
    return np.where(items < num_items, of_items, 0)


def prefill_balance(rows: list[tuple[int, int]], blocks_per_item: float = 1.0) -> float:
    """The mean load of the workers divided by the largest; an item costs some blocks more."""
    blocks = _tile_blocks(rows, NUM_HEADS)
    load = (blocks + blocks_per_item * (blocks > 0)).sum(axis=1)
    return load.mean() / load.max()


def tiles_us(rows: list[tuple[int, int]], heads_per_kv_head: int) -> float:
    """The least time of rows as tiles of a prefill."""
    blocks = _tile_blocks(rows, heads_per_kv_head * NUM_KV_HEADS)
    operations = 4 * PREFILL_TILE_TOKENS * BLOCK_TOKENS * HEAD_SIZE
    return blocks.sum(axis=1).max() * operations * NUM_WORKERS / OPERATIONS_PER_US


DECODES = {
    **{f"64 x {context}": [context] * 64 for context in (250, 256, 1000, 1024, 8192)},
    "64 x 20 to 500": np.linspace(20, 500, 64, dtype=int).tolist(),
    "64 x 100 to 1990": np.linspace(100, 1990, 64, dtype=int).tolist(),
    "1 x 1024": [1024],
    "1 x 32768": [32768],
}
SHORT_ROWS = {
    f"64 x {tokens} tokens at {context}": [(tokens, context)] * 64
    for context in (1000, 8192)
    for tokens in (4, 8)
}
PREFILLS = {
    "1 x 1800": [(1800, 1800)],
    "1 x 2048": [(2048, 2048)],
    "2 x 1024": [(1024, 1024)] * 2,
    "1 x 8192": [(8192, 8192)],
    **{f"{n} at 4k": [(n, 4096)] for n in (128, 256, 512)},
}


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print("Bounds of a model, no measurements.\n")
    print("| decode | of the bandwidth | us with nothing in flight |\n|---|---|---|")
    for name, contexts in DECODES.items():
        bound = decode_bound(contexts)
        print(f"| {name} | {bound.of_bandwidth:.3f} | {bound.idle_us:.2f} |")
    print("\n| latents, 16 heads | of the bandwidth | us with nothing in flight |\n|---|---|---|")
    for name, contexts in DECODES.items():
        bound = latent_bound(contexts)
        print(f"| {name} | {bound.of_bandwidth:.3f} | {bound.idle_us:.2f} |")
    print("\n| short rows | heads per kv head | us | of the bandwidth | us as tiles |")
    print("|---|---|---|---|---|")
    for (name, rows), heads in itertools.product(SHORT_ROWS.items(), SHORT_DURATIONS):
        bound, as_tiles = short_bound(rows, heads), tiles_us(rows, heads)
        print(f"| {name} | {heads} | {bound.us:.0f} | {bound.of_bandwidth:.2f} | {as_tiles:.0f} |")
    print("\n| prefill | balance |\n|---|---|")
    for name, rows in PREFILLS.items():
        print(f"| {name} | {prefill_balance(rows):.2f} |")


if __name__ == "__main__":
    main()
