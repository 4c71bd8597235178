"""Ragged paged attention: the contract that every implementation keeps.

One call serves one layer for one step: a flat batch of query tokens, prefill chunks and decodes
together, attends causally to the keys and values that its rows have in a paged cache, after the
keys and values of the step itself have been written there. An implementation (a backend) owns the
layout of the cache; callers only carry the array from call to call.

Axis letters: T tokens, R rows (requests of the step), N query heads, K kv heads, H head size,
P blocks per row.
"""

import importlib
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.platform import Chip


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """What is static about a layer's attention; equal for layers of the same kind."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    # Scores are scale * (q . k).
    scale: float
    # A token sees itself and the window - 1 tokens before it; None: all before it.
    sliding_window: int | None = None
    # Scores become soft_cap * tanh(scores / soft_cap).
    soft_cap: float | None = None
    # The cache keeps keys and values in this type, scaled per kv head; None: in their own.
    kv_dtype: Literal["int8", "float8_e4m3fn"] | None = None


class KVScales(NamedTuple):
    """What a cache of a `kv_dtype` is multiplied by to become keys and values."""

    k: jax.Array  # float32 [K]
    v: jax.Array  # float32 [K]


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The largest batch that a plan will ever make: what memory outside the cache depends on."""

    num_tokens: int
    num_rows: int
    max_blocks: int  # of a row
    block_size: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RaggedBatch:
    """The rows of one step.

    The tokens of row r are the flat positions [query_starts[r], query_starts[r + 1]); they are the
    last ones of its context. Decodes come first: each of the rows [0, num_decodes) has exactly one
    token, at the flat position equal to its row.

    Padding: rows without tokens repeat the total in query_starts and have context length 0; tokens
    at or past query_starts[R] belong to no row. They are not written to the cache and their outputs
    are finite garbage. No row may read a block that another row writes in the same step. No other
    block or token of the cache than those in the contexts has any
    influence, whatever it holds.
    """

    query_starts: jax.Array  # int32 [R + 1]
    # Tokens in the cache after this step's have been written.
    context_lens: jax.Array  # int32 [R]
    # Block i of a row holds its tokens [i * block_size, (i + 1) * block_size). Entries at or past
    # ceil(context_len / block_size) are garbage, possibly out of range, and never followed. Neither
    # are those whose tokens all lie before a layer's sliding window: their blocks may be gone.
    block_tables: jax.Array  # int32 [R, P]
    num_decodes: jax.Array  # int32 []
    block_size: int = field(metadata={"static": True})
    # Every row with tokens is a decode, and T == R.
    decode_only: bool = field(metadata={"static": True})


class TokenPlaces(NamedTuple):
    """Where the tokens of a batch belong."""

    rows: jax.Array  # int32 [T]; in range for padding, too
    positions: jax.Array  # int32 [T]: position in the row's context; -1 for padding


def locate_tokens(batch: RaggedBatch, num_tokens: int) -> TokenPlaces:
    """Find row and position of every token of a batch."""
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


class AttentionBackend(Protocol):
    """An implementation of the op.

    Backends are static arguments of jitted functions, so they must be hashable: frozen dataclasses.
    Their methods, except `check`, are plain functions to be traced by the caller.
    """

    @property
    def name(self) -> str:
        """The name under which the backend is registered, and by which logs call it."""
        ...

    @property
    def cache_head_axis(self) -> int:
        """The axis of a layer's cache along which kv heads lie, one after the other: where heads
        are cut over devices, it is cut with them."""
        ...

    def tuned_for(self, chip: Chip) -> Self:
        """The backend with its tunables chosen for a chip."""
        ...

    def check(
        self, config: AttentionConfig, limits: BatchLimits, *, dtype: DTypeLike, chip: Chip
    ) -> None:
        """Raise ValueError, naming what to change, if this cannot be run on that chip."""
        ...

    def cache_shape(
        self, config: AttentionConfig, *, num_blocks: int, block_size: int, dtype: DTypeLike
    ) -> jax.ShapeDtypeStruct:
        """Shape and type of one layer's cache for keys and values of type dtype.

        Caches are born as zeros. The type may differ from dtype (or the config's kv_dtype), where a
        platform updates another type of the same size faster.
        """
        ...

    def prepare(
        self, batch: RaggedBatch, configs: tuple[AttentionConfig, ...], *, num_tokens: int
    ) -> Any:
        """Do once per step what layers with these configs (repetitions allowed) can share.

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
          q: [T, N, H]; query head n belongs to kv head n // (N // K). Positions are already
            rotated in, as in k.
          k, v: [T, K, H], of the dtype that `cache_shape` was asked for.
          cache: as described by `cache_shape`; donate it, it is updated in place.
          sinks: [N], logits of a key that every token sees and whose value is zero.
          kv_scales: given if and only if the config has a kv_dtype.

        Returns:
          The output [T, N, H], of q's dtype, and the updated cache.
        """
        ...


_backends: dict[str, AttentionBackend] = {}


def register_backend(backend: AttentionBackend) -> None:
    """Make a backend available under its name, in this process only."""
    if ":" in backend.name:
        raise ValueError(
            f"an attention backend cannot be registered as {backend.name!r}: names with a colon "
            "are those of objects to import; leave the colon out"
        )
    if backend.name in _backends:
        raise ValueError(f"an attention backend named {backend.name!r} is registered already")
    _backends[backend.name] = backend


def get_backend(name: str) -> AttentionBackend:
    """The backend registered under a name, or the one that 'module:name' says where to find.

    The latter runs the code of that module: such names are the operator's, never a request's.
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
    """The object that 'module:name' names, or what it makes if it is a class or a factory."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise ValueError(f"attention backend {spec!r} must be written as 'module:name'")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's code: importing it may raise anything
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


# Backends for those who ask for none, best first. On a TPU there is no second best: XLA would copy
# the whole cache in every step, so what the kernel refuses is refused.
_DEFAULTS = {"cpu": ("native", "xla"), "gpu": ("mosaic_sm90", "xla"), "tpu": ("tpu",)}


def default_backends(chip: Chip) -> tuple[str, ...]:
    """Names of the backends for a chip whose user asked for none, best first: the first that
    accepts all of a model's layers (`check`) is the one to take."""
    if chip.platform not in _DEFAULTS:
        raise ValueError(f"platform {chip.platform!r} is not one of {', '.join(_DEFAULTS)}")
    return tuple(name for name in _DEFAULTS[chip.platform] if name in _backends)


def check_common(config: AttentionConfig, limits: BatchLimits, *, dtype: DTypeLike) -> None:
    """Refuse what no backend can run."""
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
    if limits.block_size < 1:
        raise ValueError(f"block_size={limits.block_size} must be at least 1; set --block-size")
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"attention in {jnp.dtype(dtype).name} is not supported; "
            "set --dtype to float32, bfloat16 or float16"
        )
