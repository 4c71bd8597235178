"""What a step gives to every layer: its batches, and the data prepared from them once per step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxllm_kernels.add_norm.api import AddNorm
from jaxllm_kernels.mla.api import LatentBackend, LatentConfig
from jaxllm_kernels.ragged_paged_attention.api import (
    AttentionBackend,
    AttentionConfig,
    RaggedBatch,
)
from jaxllm_kernels.recurrent.rows import StateRows, prepare_rows

from jaxllm.cache_groups import Window, window_of
from jaxllm.layers.rope import Rotary
from jaxllm.layers.state import StateOps, States, UnverifiedStates


class PagedBatch(NamedTuple):
    """The rows of a step with the block tables of one group of layers."""

    batch: RaggedBatch
    prepared: Any  # the result of backend.prepare for the batch


class LentCache(NamedTuple):
    """The cache of a layer to whose keys and values later layers attend.

    It has the keys and values of the step's tokens beside it. A later layer calls the attention op
    with the very same ones: the op writes them again, which changes nothing, and attends. So every
    backend can do it, and only one layer has a cache.
    """

    pages: jax.Array
    keys: jax.Array  # [T, K, H], as they were given to the op
    values: jax.Array  # [T, K, H]
    scales: jax.Array | None  # of the cache's codes, [K, 2]


class GivenEmbeddings(NamedTuple):
    """Embeddings that stand in place of those of tokens: of images, as a tower has computed them,
    or of prompts, as requests have them."""

    rows: jax.Array  # i32 [T]: the row of each token; -1: the token has its own embedding
    pool: jax.Array  # [rows, outputs * D]: the embedding, then what is added behind first layers

    def put_into(self, hidden: jax.Array) -> jax.Array:
        """Replace what is given of embeddings [T, D]. A step without images reads nothing."""
        return jax.lax.cond(
            jnp.any(self.rows >= 0),
            lambda: jnp.where(self.rows[:, None] >= 0, self._output(0, hidden), hidden),
            lambda: hidden,
        )

    def add_behind(self, layer: int, hidden: jax.Array) -> jax.Array:
        """Add to the hidden states [T, D] behind a layer what is given for it."""
        return jax.lax.cond(
            jnp.any(self.rows >= 0),
            lambda: hidden + jnp.where(self.rows[:, None] >= 0, self._output(layer + 1, hidden), 0),
            lambda: hidden,
        )

    def adds_behind(self, layer: int, size: int) -> bool:
        """Whether something is given for a layer of this size."""
        return (layer + 2) * size <= self.pool.shape[1]

    def _output(self, index: int, hidden: jax.Array) -> jax.Array:
        size = hidden.shape[-1]
        return self.pool[self.rows, index * size : (index + 1) * size].astype(hidden.dtype)


Cache = jax.Array | LentCache | States | UnverifiedStates

# The attention of a mixer and its implementation: heads with keys and values, or latents. Those of
# a model are all of one kind, so that it has one implementation.
MixerConfig = AttentionConfig | LatentConfig
MixerBackend = AttentionBackend | LatentBackend


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The argument that every mixer and every ffn of a step takes beside its input."""

    # Layers with the same window keep the same tokens: they are a group with one batch.
    windows: tuple[Window, ...] = field(metadata={"static": True})
    paged: tuple[PagedBatch, ...]  # by window
    backend: MixerBackend = field(metadata={"static": True})
    # The devices over which heads are sharded; None: there is one device.
    mesh: Mesh | None = field(default=None, metadata={"static": True})
    # What adds and normalises in one launch; None: XLA does.
    add_norm: AddNorm | None = field(default=None, metadata={"static": True})
    # The rows of the step for mixers with states, and their ops; None: there are no such mixers.
    state_rows: StateRows | None = None
    state_ops: StateOps | None = field(default=None, metadata={"static": True})
    # The decoder sets the positions of the tokens in their sequences, i32 [T], their rotations in
    # this layer, and the layer's own input for each token, [T, P], in models that have it.
    positions: jax.Array | None = None
    rotary: Rotary | None = None
    layer_input: jax.Array | None = None
    # A jax.Ref of i32 [L, E] to which layers write how many tokens each of their experts has, and
    # the number of the layer, i32 [], which the decoder sets; None: nobody counts them.
    expert_tokens: Any = None
    layer: jax.Array | None = None
    given: GivenEmbeddings | None = None  # None: all tokens have their own
    # Where tokens are rotated to, i32 [T], or [3, T] in time, rows and columns of images; None: to
    # their positions in their sequences.
    rope_positions: jax.Array | None = None

    @classmethod
    def prepare(
        cls,
        batches: Mapping[Window, RaggedBatch],
        configs: Sequence[MixerConfig],
        *,
        num_tokens: int,
        backend: MixerBackend,
        mesh: Mesh | None = None,
        add_norm: AddNorm | None = None,
        state_ops: StateOps | None = None,
        slots: jax.Array | None = None,
        num_slots: int = 0,
        num_drafts: jax.Array | None = None,
        most_drafts: tuple[int, int] = (0, 0),
    ) -> Self:
        """Prepare the batch of each window for the layers with this window; traced. Mixers with
        states need the slots of the rows, i32 [R], and their number, and what of the rows are
        drafts (see `prepare_rows`)."""
        paged, op = [], cast(Any, backend)  # which is for configs of this kind
        for window, batch in batches.items():
            its = tuple(config for config in configs if window_of(config) == window)
            prepared = op.prepare(batch, its, num_tokens=num_tokens) if its else None
            paged.append(PagedBatch(batch, prepared))
        state_rows = None
        if state_ops is not None:
            assert slots is not None and paged, "states without slots or rows"
            state_rows = prepare_rows(
                paged[0].batch,
                slots,
                num_tokens=num_tokens,
                num_slots=num_slots,
                num_drafts=num_drafts,
                most_drafts=most_drafts,
            )
        return cls(
            windows=tuple(batches),
            paged=tuple(paged),
            backend=backend,
            mesh=mesh,
            add_norm=add_norm,
            state_rows=state_rows,
            state_ops=state_ops,
        )

    @property
    def num_tokens(self) -> jax.Array:
        """The number of the step's tokens, without padding at the end: int32 []."""
        return self.paged[0].batch.query_starts[-1]

    def of_window(self, window: Window) -> PagedBatch:
        """The batch of the layers with this window."""
        return self.paged[self.windows.index(window)]
