"""What a step gives to every layer: its batch, and what was prepared of it once for all."""

from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh
from jaxllm_kernels.ragged_paged_attention.api import AttentionBackend, RaggedBatch

from jaxllm.layers.rope import Rotary


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The argument that every mixer and every ffn of a step takes beside its input."""

    batch: RaggedBatch
    prepared: Any  # what backend.prepare made of the batch
    backend: AttentionBackend = field(metadata={"static": True})
    # The devices over which heads are cut; None: there is one.
    mesh: Mesh | None = field(default=None, metadata={"static": True})
    # The rotations of the tokens in this layer; the decoder sets them, layer by layer.
    rotary: Rotary | None = None
