"""What turns a pooled hidden state into what a request gets: in place of a head for logits."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.dense import DenseSpec, HeadNormSpec
from jaxllm.layers.embedding import Embedding
from jaxllm.models.checkpoint_map import CheckpointMap


@dataclass(frozen=True, kw_only=True)
class PoolingHeadSpec:
    """The layers behind the pooling, from the hidden size on; none: the state itself is wanted."""

    layers: tuple[DenseSpec | HeadNormSpec, ...] = ()
    # Scores by the language model head instead: how much likelier the first token is than the
    # second. Rerankers that answer "yes" or "no" do so.
    tokens: tuple[int, int] | None = None
    # Or the logits of these tokens. Reward models answer with one of several, such as "+" or "-".
    logits: tuple[int, ...] = ()

    @property
    def reads_logits(self) -> bool:
        """Whether the language model head is what it reads."""
        return self.tokens is not None or bool(self.logits)

    @property
    def multiplies(self) -> bool:
        """Whether it has products, which are of float32 whatever the model's type is."""
        return self.reads_logits or any(isinstance(layer, DenseSpec) for layer in self.layers)

    def size(self, hidden_size: int) -> int:
        """How many numbers there are for a prompt."""
        if self.tokens is not None:
            return 1
        if self.logits:
            return len(self.logits)
        return self.layers[-1].out_size if self.layers else hidden_size

    def make(self, hidden_size: int, *, dtype: DTypeLike) -> "PoolingHead":
        return PoolingHead(self, hidden_size, dtype=dtype)

    def names(self, names: CheckpointMap) -> CheckpointMap:
        """The map of a model with this head. Embedders are also written without the names of what
        is around the decoder, and with or without a head for logits."""
        if self.reads_logits:
            return names
        layouts = [dataclasses.replace(its, others=()) for its in (names, *names.others)]
        layouts += [its.with_names(model="") for its in layouts]
        linears = {name: f"{folder}.linear" for name, folder in self._folders.items()}
        linears |= {its.name: its.stored_as for its in self.layers if its.stored_as is not None}
        head = names.renamed.get("lm_head", "lm_head").rpartition(".")[2]
        first, *others = [
            its.with_names(pooling_head="", **linears).ignoring(rf"(.*\.)?{head}\..*")
            for its in layouts
        ]
        folders = tuple(self._folders.values())
        return dataclasses.replace(first, others=tuple(others), folders=folders)

    @property
    def _folders(self) -> dict[str, str]:
        """The folders of layers with files of their own."""
        return {layer.name: layer.folder for layer in self.layers if layer.folder is not None}


class PoolingHead(nnx.Module):
    """f32 [n, D] -> f32 [n, K]."""

    def __init__(self, spec: PoolingHeadSpec, hidden_size: int, *, dtype: DTypeLike):
        self.spec = spec
        size = hidden_size
        for layer in spec.layers:
            setattr(self, layer.name, layer.make(size, dtype=dtype))
            size = layer.out_size

    def __call__(self, pooled: jax.Array, lm_head: Embedding | None) -> jax.Array:
        if self.spec.reads_logits:
            assert lm_head is not None, "this part of the model has no head"
            tokens = jnp.array(self.spec.tokens or self.spec.logits)
            rows = lm_head(tokens).astype(jnp.float32)
            if self.spec.tokens is not None:
                rows = rows[:1] - rows[1:]
            found = lm_head.matmul(pooled, rows)
            if self.spec.logits and lm_head.bias is not None:
                found = found + lm_head.bias[...][tokens].astype(jnp.float32)
            return found
        for layer in self.spec.layers:
            pooled = getattr(self, layer.name)(pooled)
        return pooled
