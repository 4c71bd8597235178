"""Ragged paged attention: the contract of every implementation.

One call computes one layer for one step. The query tokens are a flat batch of prefill chunks and
decodes. The call writes the step's keys and values into the paged cache first. Then each token
attends to its row's keys and values in the cache: causally, unless a batch says otherwise. An
implementation (a backend) defines the layout of the cache; callers only pass the array from call to
call.

Axis letters: T tokens, R rows (requests of the step), N query heads, K kv heads, H head size,
V size of values (mostly H), P blocks per row.
"""

import dataclasses
import importlib
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm_kernels.platform import Chip


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The static part of a layer's attention; equal for layers of the same kind."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    # Scores are scale * (q . k).
    scale: float
    # The size of a head's values and outputs; None: head_size.
    v_head_size: int | None = None
    # A token sees itself and the window - 1 tokens before it; None: all before it.
    sliding_window: int | None = None
    # A token sees those of its own chunk up to itself: chunks are of so many positions, from zero
    # on. None: there are no chunks.
    chunk: int | None = None
    # Scores become soft_cap * tanh(scores / soft_cap).
    soft_cap: float | None = None
    # The cache stores keys and values in this dtype, with a scale per kv head; None: in their own.
    kv_dtype: Literal["int8", "float8_e4m3fn"] | None = None

    @property
    def value_size(self) -> int:
        return self.v_head_size or self.head_size


class KVScales(NamedTuple):
    """The factors that convert a cache with a `kv_dtype` to keys and values."""

    k: jax.Array  # float32 [K]
    v: jax.Array  # float32 [K]


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The largest batch of a plan. Memory outside the cache depends on it."""

    num_tokens: int
    num_rows: int
    max_blocks: int  # of a row
    block_size: int


# The most tokens of a short row.
SHORT_ROW = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RaggedBatch:
    """The rows of one step.

    The tokens of row r are the flat positions [query_starts[r], query_starts[r + 1]); they are the
    last ones of its context. Decodes come first: each of the rows [0, num_decodes) has exactly one
    token, at the flat position equal to its row. Short rows come next: each of the rows
    [num_decodes, num_decodes + num_short) has two to SHORT_ROW tokens. So few tokens over a context
    cost the time in which its pages are read, as a decode does.

    Padding: rows without tokens repeat the total in query_starts and have context length 0. Tokens
    at or past query_starts[R] belong to no row. They are not written to the cache, and their
    outputs are arbitrary but finite. No row may read a block that another row writes in the same
    step. Blocks and tokens of the cache outside of the contexts have no influence, whatever they
    hold.
    """

    query_starts: jax.Array  # int32 [R + 1]
    # Tokens in the cache after this step's have been written.
    context_lens: jax.Array  # int32 [R]
    # Block i of a row holds its tokens [i * block_size, (i + 1) * block_size). Entries at or past
    # ceil(context_len / block_size) are arbitrary, possibly out of range, and never followed. The
    # same holds for blocks entirely before a layer's sliding window or chunk: they may be freed.
    block_tables: jax.Array  # int32 [R, P]
    num_decodes: jax.Array  # int32 []
    # int32 []; zero is always right, and costs time only
    num_short: jax.Array | np.int32 = np.int32(0)
    # int32 [T]: the position of the last token that each token sees, itself or a later one of its
    # row in this step. It never decreases along a row. Of padding it is arbitrary. None: itself;
    # other batches are only for backends that are `SeesAhead`.
    last_seen: jax.Array | None = None
    block_size: int = field(metadata={"static": True})
    # Every row with tokens is a decode, and T == R.
    decode_only: bool = field(metadata={"static": True})


class TokenPlaces(NamedTuple):
    """The row and position of each token of a batch."""

    rows: jax.Array  # int32 [T]; in range for padding, too
    positions: jax.Array  # int32 [T]: position in the row's context; -1 for padding


def locate_tokens(batch: RaggedBatch, num_tokens: int) -> TokenPlaces:
    """Find the row and position of every token of a batch."""
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    num_rows = batch.context_lens.shape[0]
    if batch.decode_only:
        assert num_tokens == num_rows, (num_tokens, num_rows)
        rows = tokens
        is_real = tokens < batch.num_decodes
    else:
        ends = batch.query_starts[1:]
        rows = jnp.searchsorted(ends, tokens, side="right", method="compare_all").astype(jnp.int32)
        rows = jnp.minimum(rows, num_rows - 1)
        is_real = tokens < batch.query_starts[-1]
    positions = batch.context_lens[rows] - (batch.query_starts[rows + 1] - tokens)
    return TokenPlaces(rows, jnp.where(is_real, positions, -1))


def fresh_rows(batch: RaggedBatch, fewest: int) -> jax.Array:
    """Which rows have at least so many tokens, and nothing before them: bool [R]. 0: none."""
    lengths = jnp.diff(batch.query_starts)
    if not fewest:
        return jnp.zeros_like(lengths, bool)
    return (lengths == batch.context_lens) & (lengths >= fewest)


def without_short_rows_that_see_ahead(batch: RaggedBatch, num_tokens: int) -> RaggedBatch:
    """The batch with only those short rows before the first row that has a token which sees later
    ones. The others are then computed as chunks are, by kernels that know `last_seen`."""
    if batch.last_seen is None or batch.decode_only:
        return batch
    places = locate_tokens(batch, num_tokens)
    sees_ahead = (places.positions >= 0) & (batch.last_seen > places.positions)
    first = jnp.min(jnp.where(sees_ahead, places.rows, batch.context_lens.shape[0]))
    num_short = jnp.clip(first - batch.num_decodes, 0, batch.num_short)
    return dataclasses.replace(batch, num_short=num_short)


class AttentionBackend(Protocol):
    """An implementation of the op.

    Backends are static arguments of jitted functions, so they must be hashable: frozen dataclasses.
    Their methods, except `check`, are plain functions to be traced by the caller.
    """

    @property
    def name(self) -> str:
        """The name under which the backend is registered, also used in logs."""
        ...

    @property
    def cache_head_axis(self) -> int:
        """The axis of kv heads in a layer's cache. If heads are sharded over devices, the cache is
        sharded along this axis."""
        ...

    def tuned_for(self, chip: Chip) -> Self:
        """Return the backend with its tunables chosen for a chip."""
        ...

    def check(
        self, config: AttentionConfig, limits: BatchLimits, *, dtype: DTypeLike, chip: Chip
    ) -> None:
        """Raise ValueError, which says what to change, if the backend cannot run this."""
        ...

    def cache_shape(
        self, config: AttentionConfig, *, num_blocks: int, block_size: int, dtype: DTypeLike
    ) -> jax.ShapeDtypeStruct:
        """Shape and dtype of one layer's cache for keys and values of type dtype.

        New caches are zero. The cache's dtype may differ from dtype (or the config's kv_dtype) if a
        platform updates another dtype of the same size faster.
        """
        ...

    def prepare(
        self, batch: RaggedBatch, configs: tuple[AttentionConfig, ...], *, num_tokens: int
    ) -> Any:
        """Compute once per step what layers with these configs (repetitions allowed) share.

        The result is a pytree that `attend` takes for each of the configs.
        """
        ...

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: jax.Array,
        batch: RaggedBatch,
        prepared: Any,
        *,
        config: AttentionConfig,
        sinks: jax.Array | None = None,
        kv_scales: KVScales | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Write this step's keys and values into the cache, then attend.

        Args:
          q: [T, N, H]; query head n belongs to kv head n // (N // K). q and k are already rotated
            by their positions.
          k, v: [T, K, H] and [T, K, V], of the dtype that was given to `cache_shape`.
          cache: an array of `cache_shape`. Donate it: it is updated in place.
          sinks: [N], logits of a key that every token sees, with a value of zero.
          kv_scales: given if and only if the config has a kv_dtype.

        Returns:
          The output [T, N, V], of q's dtype, and the updated cache.
        """
        ...


@runtime_checkable
class SeesAhead(Protocol):
    """What a backend may be in addition: it supports batches with `last_seen`."""

    @property
    def sees_ahead(self) -> Literal[True]: ...


@runtime_checkable
class TakesHeads(Protocol):
    """What a backend may have in addition: it takes the heads as the projection leaves them, and
    rotates them itself. So nothing has to arrange them for it."""

    def takes_heads(self, config: AttentionConfig, rotary_size: int | None) -> bool:
        """Whether `attend_heads` supports such layers. `rotary_size` is the size of the rotated
        part of a head; None: heads are not rotated."""
        ...

    def attend_heads(
        self,
        heads: jax.Array,
        rotary: tuple[jax.Array, jax.Array] | None,
        cache: jax.Array,
        batch: RaggedBatch,
        prepared: Any,
        *,
        config: AttentionConfig,
    ) -> tuple[jax.Array, jax.Array]:
        """Like `attend`, of heads [T, N + 2K, H]: queries, keys, values.

        `rotary` has the cos and sin of each token, float32 [T, H / 2]. Element i of the first half
        of a head is rotated with element i of the second half, in float32.
        """
        ...


_backends: dict[str, AttentionBackend] = {}


def register_backend(backend: AttentionBackend) -> None:
    """Register a backend under its name, in this process only."""
    if ":" in backend.name:
        raise ValueError(
            f"an attention backend cannot be registered as {backend.name!r}: names with a colon "
            "are those of objects to import; leave the colon out"
        )
    if backend.name in _backends:
        raise ValueError(f"an attention backend named {backend.name!r} is registered already")
    _backends[backend.name] = backend


def get_backend(name: str) -> AttentionBackend:
    """Return the backend that is registered under a name, or import the one of 'module:name'.

    The latter runs the module's code. So such names may come only from the operator, never from a
    request.
    """
    if ":" in name:
        return _import_backend(name)
    if name not in _backends:
        raise ValueError(
            f"no attention backend is named {name!r}; "
            f"set attention_backend to one of {', '.join(sorted(_backends))}, or to "
            "'module:name' of one of your own (register_backend reaches only the process that "
            "calls it, and an engine may run in another)"
        )
    return _backends[name]


def _import_backend(spec: str) -> Any:
    """Import the object 'module:name'; call it if it is a class or a factory."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise ValueError(f"attention backend {spec!r} must be written as 'module:name'")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing a user's code may raise anything
        raise ValueError(f"attention backend {spec!r} cannot be imported ({error})") from error
    if isinstance(found, type) or (callable(found) and not hasattr(found, "attend")):
        try:
            found = found()
        except Exception as error:
            raise ValueError(
                f"attention backend {spec!r} cannot be made without arguments ({error}); "
                "name a backend, or a class or function that takes none"
            ) from error
    missing = [member for member in _MEMBERS if not hasattr(found, member)]
    if missing:
        raise ValueError(
            f"attention backend {spec!r} is a {type(found).__name__} without "
            f"{', '.join(missing)}; it must be an AttentionBackend "
            "(jaxllm_kernels.ragged_paged_attention.api)"
        )
    try:
        hash(found)
    except TypeError as error:
        raise ValueError(
            f"attention backend {spec!r} cannot be hashed ({error}); make it a frozen dataclass"
        ) from error
    return found


_MEMBERS = ("name", "cache_head_axis", "tuned_for", "check", "cache_shape", "prepare", "attend")


# The default backends, best first. A TPU has no second choice: XLA would copy the whole cache in
# every step, so a layer that the kernel refuses is an error.
_DEFAULTS = {"cpu": ("native", "xla"), "gpu": ("mosaic_sm90", "xla"), "tpu": ("tpu",)}


def default_backends(chip: Chip) -> tuple[str, ...]:
    """Names of the default backends of a chip, best first. The plan takes the first one whose
    `check` accepts all layers of a model."""
    if chip.platform not in _DEFAULTS:
        raise ValueError(f"platform {chip.platform!r} is not one of {', '.join(_DEFAULTS)}")
    return tuple(name for name in _DEFAULTS[chip.platform] if name in _backends)


def check_common(config: AttentionConfig, limits: BatchLimits, *, dtype: DTypeLike) -> None:
    """Refuse configurations that no backend can run."""
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"{config.num_heads} query heads cannot share {config.num_kv_heads} kv heads evenly; "
            "correct num_attention_heads or num_key_value_heads in the model's config.json"
        )
    if config.sliding_window is not None and config.sliding_window < 1:
        raise ValueError(
            f"sliding_window={config.sliding_window} must be at least 1; "
            "correct it in the model's config.json, or set it to null for full attention"
        )
    if config.chunk is not None and (config.chunk < 1 or config.sliding_window is not None):
        raise ValueError(
            f"chunks of {config.chunk} tokens must be at least 1 long, and exclude "
            f"sliding_window={config.sliding_window}; correct the model's config.json"
        )
    if limits.block_size < 1:
        raise ValueError(f"block_size={limits.block_size} must be at least 1; set --block-size")
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"attention in {jnp.dtype(dtype).name} is not supported; "
            "set --dtype to float32, bfloat16 or float16"
        )


def check_is_usual(config: AttentionConfig) -> None:
    """Refuse what only the backends without kernels for accelerators can run."""
    if config.chunk is not None:
        raise ValueError(
            f"it does not cut contexts into chunks (of {config.chunk} tokens); "
            "set --attention-backend xla"
        )
    if config.value_size != config.head_size:
        raise ValueError(
            f"its values have the size of keys, {config.head_size}, not {config.value_size}; "
            "set --attention-backend xla"
        )
