"""Puts layers with codes in place of those of an abstract model, as a scheme says."""

import functools
from typing import Any

import jax
from flax import nnx

from jaxllm.errors import UnsupportedModelError
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.latent_attention import HeadMatrices
from jaxllm.layers.linear import Linear
from jaxllm.layers.moe import Experts
from jaxllm.layers.router import Router
from jaxllm.models.checkpoint_map import CheckpointMap, Shape
from jaxllm.quantization.form import HeldValues
from jaxllm.quantization.linear import CodedExperts, CodedHead, CodedLinear
from jaxllm.quantization.made import AtLoad
from jaxllm.quantization.scheme import Scheme

# Tensors beside codes and scales that nothing here needs: rows keep 16 bits, and the shapes of
# weights are known.
_UNUSED = (
    r".*\.(input|output|activation|input_global)_(global_)?scale",
    r".*\.weight_(shape|format)",
)
_HEAD = "lm_head"
# A tower has few weights, and they are read once for an image: they become no codes. Neither does
# a head, to which answers are most sensitive.
_TOWER = "tower."


def with_codes(names: CheckpointMap, scheme: Scheme | None) -> CheckpointMap:
    """The map of a checkpoint that was written by a scheme."""
    return names if scheme is None else names.ignoring(*_UNUSED)


def store_codes(
    model: nnx.Module, scheme: Scheme, names: CheckpointMap, *, num_shards: int
) -> None:
    """Replace the layers of an abstract model that the scheme stores as codes."""
    for path, module in list(nnx.iter_graph(model)):
        name = ".".join(map(str, path))
        if isinstance(module, Router):
            # They have few weights; a checkpoint with codes for them is refused when it is read.
            continue
        if isinstance(module, HeadMatrices):
            _store_values(module, scheme, names, name)
            continue
        kind, leaf, pieces = _kind_of(module, name)
        if kind is None:
            continue
        storage = scheme.storage_of(names.modules(f"{name}.{leaf}", pieces))
        if storage is None:
            continue
        if isinstance(storage, AtLoad) and (kind is CodedHead or name.startswith(_TOWER)):
            continue
        if kind is CodedHead and module.looks_up:
            raise UnsupportedModelError(
                f"{name} is stored as codes, and this model's scores are products with single rows "
                "of it, which are read only as values"
            )
        coded = kind(module, storage, name, products=scheme.products, num_shards=num_shards)
        *parent, last = path
        holder = functools.reduce(_step, parent, model)
        setattr(holder, str(last), coded)


def _kind_of(module: Any, name: str) -> tuple[Any, str, tuple[Shape, ...]]:
    """The class of the same layer with codes, and the leaf and the pieces of its weight."""
    if isinstance(module, Experts):
        return CodedExperts, "w13_weight", (module.w13_weight.shape,)
    if isinstance(module, Linear):
        kind: Any = CodedLinear
    elif isinstance(module, Embedding) and name == _HEAD:
        kind = CodedHead
    else:
        return None, "", ()
    given = module.weight.get_metadata()
    rows = [part.rows for part in given.get("parts", ())]
    rows = rows or [given.get("rows", module.weight.shape[0])]
    return kind, "weight", tuple((count, module.weight.shape[1]) for count in rows)


def _store_values(module: HeadMatrices, scheme: Scheme, names: CheckpointMap, name: str) -> None:
    """Attention to latents multiplies by each head's part of a matrix, in 16 bits."""
    for leaf in ("k_weight", "v_weight"):
        weight = getattr(module, leaf)
        modules = names.modules(f"{name}.{leaf}", (weight.shape,))
        storage = scheme.storage_of(modules)
        if storage is not None and not isinstance(storage, AtLoad):
            shape = jax.ShapeDtypeStruct(weight.shape, weight.dtype)
            axes = weight.get_metadata()["axes"]
            setattr(module, leaf, nnx.Param(shape, axes=axes, stored=HeldValues(storage=storage)))


def _step(module: Any, key: Any) -> Any:
    return module[key] if isinstance(key, int) else getattr(module, key)
