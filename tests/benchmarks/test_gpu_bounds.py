"""The model of the GPU attention kernels: what it computes by hand, and what it says of them."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu_bounds(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu_bounds")


def test_one_block_takes_the_sum_of_what_follows_each_other(gpu_bounds):
    take = gpu_bounds.Durations()
    outcome = gpu_bounds.simulate_decode([[gpu_bounds.BLOCK_TOKENS]], take)
    copy = gpu_bounds.BLOCK_TOKENS * gpu_bounds.HEAD_SIZE * 2 / gpu_bounds.BYTES_PER_US
    keys_arrive = take.start + 3 * take.load + copy + take.memory
    # The values arrive while the reader is at the keys.
    used = take.keys + take.softmax + take.values
    assert outcome.time == pytest.approx(keys_arrive + used + take.finish)


@pytest.mark.parametrize("context", [128 * 6, 128 * 5 + 1, 100])
def test_a_ring_does_not_drain_at_the_end_of_a_row(gpu_bounds, context):
    assert gpu_bounds.decode_bound([context] * 64).idle_us == 0


@pytest.mark.parametrize(
    ("contexts", "least"), [([256] * 64, 0.89), ([1000] * 64, 0.94), ([1024] * 64, 0.96)]
)
def test_the_bound_of_decodes(gpu_bounds, contexts, least):
    assert least < gpu_bounds.decode_bound(contexts).of_bandwidth < 1


@pytest.mark.parametrize(("heads_per_kv_head", "least"), [(4, 0.93), (8, 0.8)])
def test_short_rows_take_less_than_half_of_what_they_would_as_tiles(
    gpu_bounds, heads_per_kv_head, least
):
    rows = [(8, 1000)] * 64
    bound = gpu_bounds.short_bound(rows, heads_per_kv_head)
    assert least < bound.of_bandwidth < 1
    assert 2 * bound.us < gpu_bounds.tiles_us(rows, heads_per_kv_head)


@pytest.mark.parametrize(
    ("rows", "least"),
    [([(1800, 1800)], 0.95), ([(1024, 1024)] * 2, 0.95), ([(8192, 8192)], 0.98)],
)
def test_the_balance_of_prefills(gpu_bounds, rows, least):
    assert least < gpu_bounds.prefill_balance(rows) <= 1
