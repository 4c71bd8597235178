"""Batches that every op with states must compute correctly, and how they are computed.

A case is some requests, with their steps: how many tokens each of them has in each step. All steps
of a case are one program. Padding is NaN. Requests come and go: a slot passes to a later request,
whatever it holds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
from jaxllm_kernels.recurrent.rows import StateRows, prepare_rows, rows_of_drafts


@dataclass(frozen=True, kw_only=True)
class Case:
    """`steps` lists batches: (request, tokens) for each row, decodes first. Request r has the slot
    that is r from the last, modulo the number of slots. A row with drafts is (request, tokens,
    drafts, how many of these are right)."""

    steps: tuple[tuple[tuple[int, ...], ...], ...]
    num_tokens: int = 160
    num_rows: int = 6
    num_slots: int = 5
    decode_only: bool = False
    # How many rows of a step have drafts at most, and how many each of them has.
    most_drafts: tuple[int, int] = (0, 0)


CASES = {
    "whole": Case(steps=(((0, 130),),)),
    "pieces of one": Case(steps=(((0, 1),),) * 5),
    "decodes": Case(
        steps=(((0, 1), (1, 1), (2, 1)), ((2, 1), (0, 1)), ((1, 1), (2, 1), (0, 1))),
        num_tokens=6,
        decode_only=True,
    ),
    "prefill, then decodes": Case(steps=(((0, 70),), ((0, 1),), ((0, 1),))),
    "borders of tiles": Case(
        steps=(((0, 63), (1, 64)), ((1, 1), (0, 65)), ((0, 2), (1, 63)), ((1, 1), (0, 1)))
    ),
    "mixed": Case(
        steps=(
            ((0, 5), (1, 90), (2, 3)),
            ((0, 1), (2, 1), (3, 2), (1, 100)),
            ((1, 1), (2, 1), (3, 1), (0, 71), (4, 80)),
        )
    ),
    "rows without tokens": Case(steps=(((0, 9), (1, 20)), ((0, 1), (2, 0), (1, 12), (3, 0)))),
    "no rows": Case(steps=((),)),
    "no padding": Case(
        steps=(((0, 1), (1, 1), (2, 62)),) * 2, num_tokens=64, num_rows=3, num_slots=3
    ),
    "more rows than tokens": Case(steps=(((0, 1), (1, 3)),) * 2, num_tokens=8, num_rows=16),
    # A request of 5 and more takes the slot of the one before by five.
    "slots pass on": Case(steps=(((0, 66), (1, 4)), ((1, 1), (5, 3)), ((1, 1), (5, 1)))),
    # None, some and all of them right; beside decodes and tiles; short and full; a request that
    # begins with drafts behind its only token.
    "drafts": Case(
        steps=(
            ((0, 66), (1, 4), (2, 2)),
            ((2, 1), (0, 5, 4, 2), (1, 4, 3, 0), (3, 70)),
            ((2, 1), (1, 5, 4, 4), (3, 2, 1, 1), (4, 3, 2, 1)),
            ((3, 1), (4, 1), (0, 2, 1, 0), (2, 5, 4, 3)),
            ((1, 1), (2, 1), (3, 1), (0, 3)),
        ),
        most_drafts=(3, 4),
    ),
    # Both parts of the row are longer than what a kernel computes at once.
    "many drafts": Case(
        steps=(((0, 3), (1, 40)), ((1, 1), (0, 120, 70, 66)), ((1, 1), (0, 75, 72, 3)), ((0, 9),)),
        most_drafts=(1, 72),
    ),
}

# The next state and the outputs of an op for a step.
Run = Callable[[Any, Any, StateRows], tuple[Any, Any]]


def run_case(
    case: Case,
    run: Run,
    state: Any,
    make: Callable[[np.random.Generator, int], Any],
) -> dict[int, np.ndarray]:
    """Compute a case; return the outputs of each request.

    Args:
      run: operands, states and rows of a step to outputs and states; traced.
      state: the first states, a tree of arrays [S, ...]; what they hold must have no influence.
      make: draws the operands of so many tokens of a request, a tree of arrays [T, ...].
    """
    totals: dict[int, int] = {}
    for request, length, *drafts in (row for step in case.steps for row in step):
        totals[request] = totals.get(request, 0) + _num_right(length, *drafts)
    operands = {r: make(np.random.default_rng(r), total) for r, total in totals.items()}
    shape = make(np.random.default_rng(0), case.num_tokens)
    done = dict.fromkeys(totals, 0)
    outputs: dict[int, list[np.ndarray]] = {r: [] for r in totals}

    @jax.jit
    def compute(operands, state, batch, slots, num_drafts, num_right):
        most, count = case.most_drafts
        rows = prepare_rows(
            batch,
            slots,
            num_tokens=case.num_tokens,
            num_slots=case.num_slots,
            num_drafts=num_drafts if most else None,
            most_drafts=case.most_drafts,
        )
        out, state = run(operands, state, rows)
        if (drafts := rows.drafts) is not None:
            of_drafts = jax.tree.map(lambda x: x.at[drafts.tokens].get(mode="clip"), operands)
            its, right = (
                x.at[drafts.rows].get(mode="fill", fill_value=fill)
                for x, fill in ((slots, case.num_slots), (num_right, 0))
            )
            _, state = run(of_drafts, state, rows_of_drafts(its, right, count))
        return out, state

    for step in case.steps:
        packed = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), shape)
        starts = np.concatenate([[0], np.cumsum([row[1] for row in step])]).astype(int)
        for (request, *row), start in zip(step, starts, strict=False):
            length, count = row[0], _num_right(*row)
            wrong = make(np.random.default_rng(1000 + request), length - count)
            own = slice(done[request], done[request] + count)

            def put(x, other, full, own=own, start=start, count=count, length=length):
                full[start : start + count] = x[own]
                full[start + count : start + length] = other

            jax.tree.map(put, operands[request], wrong, packed)
        batch, slots = _pack(case, step, done)
        numbers = np.zeros((2, case.num_rows), np.int32)
        for index, (_, _, *drafts) in enumerate(step):
            numbers[:, index] = drafts or 0
        # Nothing else awaits a step without rows, and an emulated kernel must not outlive its test.
        out, state = jax.block_until_ready(compute(packed, state, batch, slots, *numbers))
        for (request, *row), start in zip(step, starts, strict=False):
            count = _num_right(*row)
            outputs[request].append(np.asarray(out[start : start + count], np.float64))
            done[request] += count
    return {request: np.concatenate(its) for request, its in outputs.items()}


def _num_right(length: int, num_drafts: int = 0, num_right: int = 0) -> int:
    """How many tokens of a row count."""
    return length - num_drafts + num_right


def largest_error(
    outputs: Mapping[int, np.ndarray],
    expected: Callable[[np.random.Generator, int], np.ndarray],
) -> float:
    """The largest relative error (of norms) of the requests of a case. `expected` has the outputs
    for so many tokens of a request, which `run_case` drew in the same way."""
    errors = [0.0]
    for request, out in outputs.items():
        if len(out):
            exact = expected(np.random.default_rng(request), len(out))
            errors.append(float(np.linalg.norm(out - exact) / np.linalg.norm(exact)))
    return float(np.max(errors))  # a NaN is one, too


def _pack(
    case: Case, step: Sequence[tuple[int, ...]], done: dict[int, int]
) -> tuple[RaggedBatch, jax.Array]:
    """The rows of a step, and their slots."""
    lengths, contexts = (np.zeros(case.num_rows, np.int32) for _ in range(2))
    slots = np.full(case.num_rows, case.num_slots, np.int32)
    for row, (request, length, *_) in enumerate(step):
        lengths[row] = length
        contexts[row] = done[request] + length if length else 0
        slots[row] = case.num_slots - 1 - request % case.num_slots
    batch = RaggedBatch(
        query_starts=jnp.asarray(np.concatenate([[0], lengths.cumsum()]), jnp.int32),
        context_lens=jnp.asarray(contexts),
        block_tables=jnp.zeros((case.num_rows, 0), jnp.int32),
        num_decodes=jnp.int32((lengths == 1).cumprod().sum()),
        block_size=1,
        decode_only=case.decode_only,
    )
    return batch, jnp.asarray(slots)
