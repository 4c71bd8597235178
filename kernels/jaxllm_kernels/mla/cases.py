"""Named batches that every backend must compute correctly, and the correct results in float64.

As in `ragged_paged_attention.cases`, the backend itself fills the cache with the history of the
rows, in steps of the same shape, and everything that no token may read is NaN or garbage.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm_kernels.common import cdiv, round_up
from jaxllm_kernels.mla.api import LatentBackend, LatentConfig
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch

# The largest relative error (of norms) of a backend.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}

_OUT_OF_RANGE = (-1, -(2**31), 2**31 - 1, 10**6)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step. A row is (tokens in this step, context length after it); decodes come first."""

    name: str
    rows: tuple[tuple[int, int], ...]
    # The shape of the program; entries without rows are padding.
    num_tokens: int = 64
    num_rows: int = 8
    max_blocks: int = 12
    num_heads: int = 4
    latent_size: int = 32
    rope_size: int = 8
    block_size: int = 16
    decode_only: bool = False
    fewest_fresh: int = 0

    @property
    def config(self) -> LatentConfig:
        return LatentConfig(
            num_heads=self.num_heads,
            latent_size=self.latent_size,
            rope_size=self.rope_size,
            # Large enough that weights differ clearly.
            scale=2 * (self.latent_size + self.rope_size) ** -0.5,
            fewest_fresh=self.fewest_fresh,
        )


_DECODES = ((1, 1), (1, 16), (1, 17), (1, 100), (1, 33))
_MIXED = ((1, 5), (1, 64), (1, 130), (30, 61), (17, 17), (3, 90))

CASES = (
    Case(name="mixed", rows=_MIXED),
    Case(name="decodes", rows=_DECODES, num_tokens=8, decode_only=True),
    Case(name="decodes_in_a_mixed_program", rows=_DECODES),
    Case(name="prefills", rows=((20, 20), (7, 40), (16, 32), (9, 9))),
    Case(name="all_padding", rows=()),
    Case(name="all_padding_decodes", rows=(), num_tokens=8, decode_only=True),
    Case(name="no_padding", rows=((1, 64), (1, 7), (62, 62)), num_rows=3),
    Case(name="rows_without_tokens", rows=((1, 9), (10, 30), (0, 0), (12, 12), (0, 0), (5, 100))),
    Case(name="page_borders", rows=((1, 16), (1, 33), (16, 16), (16, 32), (8, 64), (5, 69))),
    Case(name="chunk_longer_than_a_page_over_history", rows=((50, 90),), block_size=8),
    Case(name="more_rows_than_tokens", rows=((1, 20), (1, 3), (5, 12)), num_tokens=8, num_rows=16),
    Case(name="one_head", rows=_MIXED, num_heads=1),
    Case(name="more_heads_than_lines", rows=_MIXED, num_heads=520),
    Case(name="rows_of_whole_lanes", rows=_MIXED, latent_size=96, rope_size=32),
    Case(name="sizes_of_deepseek", rows=_MIXED, num_heads=16, latent_size=512, rope_size=64),
    # Rows 1 and 3 are fresh. The others have too few tokens, or a context.
    Case(
        name="fresh_rows",
        rows=((1, 9), (12, 12), (11, 11), (17, 17), (12, 40)),
        fewest_fresh=12,
    ),
    Case(name="sizes_of_mistral_small_4", rows=_MIXED, latent_size=256, rope_size=64),
)


class CaseResult(NamedTuple):
    """A backend's results for a case's step, of tokens that are not of fresh rows. (The history has
    fresh rows, too: what the backend wrote of these is attended to.)"""

    out: np.ndarray  # float64 [tokens of the step, N, L]
    expected: np.ndarray  # float64 [tokens of the step, N, L]
    all_finite: bool  # including the outputs of padding
    attends_fresh: bool  # whether outputs of fresh rows are what attention would make them

    @property
    def error(self) -> float:
        """Relative error."""
        norm = np.linalg.norm(self.expected)
        return float(np.linalg.norm(self.out - self.expected) / norm) if norm else 0.0


class _Request(NamedTuple):
    """A request: its whole context, unpaged, its blocks, and the tokens that a step computes."""

    q: np.ndarray  # [context, N, W]
    rows: np.ndarray  # [context, W]
    blocks: np.ndarray  # int32 [blocks of the context]
    start: int
    end: int


def run_case(
    backend: LatentBackend,
    case: Case,
    dtype: DTypeLike,
    *,
    seed: int = 0,
    history_backend: LatentBackend | None = None,
) -> CaseResult:
    """Compute a case's history and then its step with a backend. As in
    `ragged_paged_attention.cases`, another one can compute the history."""
    rng = np.random.default_rng(seed)
    config = case.config
    # Some blocks belong to no row. Their number is of the program, which many cases share.
    used = sum(cdiv(context, case.block_size) for _, context in case.rows)
    num_blocks = round_up(3 + used, 32)
    free = rng.permutation(num_blocks).astype(np.int32)
    step = []
    for i, (length, context) in enumerate(case.rows):
        owned, free = np.split(free, [cdiv(context, case.block_size)])
        own = np.random.default_rng((seed, i))  # so the numbers of a row do not depend on others
        q = own.normal(size=(context, config.num_heads, config.head_size)).astype(dtype)
        rows = own.normal(size=(context, config.head_size)).astype(dtype)
        step.append(_Request(q, rows, owned, context - length, context))

    spec = backend.cache_shape(
        config, num_blocks=num_blocks, block_size=case.block_size, dtype=dtype
    )
    # All bits set is NaN in every floating type.
    poison = np.full(spec.size * spec.dtype.itemsize, 0xFF, np.uint8)
    cache = jnp.asarray(poison.view(spec.dtype).reshape(spec.shape))

    run = functools.partial(_run, config=config)
    before = dataclasses.replace(case, num_tokens=max(case.num_tokens, 64), decode_only=False)
    for requests in _history(step, before):
        operands = _pack(requests, before, dtype, rng)
        _, cache = run(*operands, cache, backend=history_backend or backend)
    out, _ = run(*_pack(step, case, dtype, rng), cache, backend=backend)

    out = np.asarray(out).astype(np.float64)
    nothing = np.zeros((0, *out.shape[1:]))
    expected = np.concatenate([nothing, *(_attend_float64(request, config) for request in step)])
    is_fresh = np.zeros(len(out), bool)
    first = 0
    for length, context in case.rows:
        is_fresh[first : first + length] = 0 < config.fewest_fresh <= length == context
        first += length
    of_step = ~is_fresh[: len(expected)]
    return CaseResult(
        out[: len(expected)][of_step],
        expected[of_step],
        bool(np.isfinite(out[~is_fresh]).all()),
        bool(np.isclose(out[: len(expected)], expected, atol=0.1)[~of_step].all()),
    )


@functools.partial(jax.jit, static_argnames=("backend", "config"), donate_argnames="cache")
def _run(q, rows, batch, cache, *, backend, config):
    prepared = backend.prepare(batch, (config, config), num_tokens=len(q))
    return backend.attend(q, rows, cache, batch, prepared, config=config)


def _history(step: list[_Request], case: Case) -> list[list[_Request]]:
    """What requests have computed before a step, in steps that fit a program of the case's shape,
    each with one chunk of one request."""
    return [
        [request._replace(start=start, end=min(start + case.num_tokens, request.start))]
        for request in step
        for start in range(0, request.start, case.num_tokens)
    ]


def _pack(requests: list[_Request], case: Case, dtype: DTypeLike, rng: np.random.Generator):
    """Make the operands (q, rows, batch) of a step."""
    lengths = np.zeros(case.num_rows, np.int32)
    contexts = np.zeros(case.num_rows, np.int32)
    # Entries that must not be followed; some are valid blocks.
    garbage = np.array((*_OUT_OF_RANGE, 0, 1), np.int32)
    tables = rng.choice(garbage, size=(case.num_rows, case.max_blocks))
    for i, (_, _, blocks, start, end) in enumerate(requests):
        lengths[i], contexts[i] = end - start, end
        used = cdiv(end, case.block_size)
        tables[i, :used] = blocks[:used]
    batch = RaggedBatch(
        query_starts=jnp.asarray(np.concatenate([[0], lengths.cumsum()]), jnp.int32),
        context_lens=jnp.asarray(contexts),
        block_tables=jnp.asarray(tables),
        num_decodes=jnp.asarray(int((lengths == 1).cumprod().sum()), jnp.int32),
        block_size=case.block_size,
        decode_only=case.decode_only,
    )
    operands = []
    size = case.config.head_size
    for name, shape in (("q", (case.num_heads, size)), ("rows", (size,))):
        tokens = [getattr(request, name)[request.start : request.end] for request in requests]
        shape = (case.num_tokens - lengths.sum(), *shape)
        # Of padding only the queries may be read: their outputs must be finite.
        padding = rng.normal(size=shape) if name == "q" else np.full(shape, np.nan)
        operands.append(jnp.asarray(np.concatenate([*tokens, padding.astype(dtype)]), dtype))
    return *operands, batch


def _attend_float64(request: _Request, config: LatentConfig) -> np.ndarray:
    """The expected results for the tokens of a request: [tokens, N, L]."""
    q = request.q[request.start : request.end].astype(np.float64)
    rows = request.rows.astype(np.float64)
    scores = config.scale * np.einsum("tnw,cw->ntc", q, rows)
    seen = np.arange(request.start, request.end)[:, None] >= np.arange(len(rows))
    weights = np.exp(np.where(seen, scores, -np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("ntc,cl->tnl", weights, rows[:, : config.latent_size])
