"""Adapters on the device: where they change a model, their arrays, and the layers that add them.

A model knows nothing of adapters. A step with rows that have some replaces the model's linear
layers, once it has merged it with its weights, by layers that add each token's low-rank product to
their outputs. The arrays are an argument of such steps: neither weights nor state.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxllm_kernels.low_rank.api import LowRank, LowRankOp

from jaxllm.layers.linear import Linear
from jaxllm.layers.router import Router
from jaxllm.lora.adapter_file import Matrices
from jaxllm.models.base import Model
from jaxllm.models.checkpoint_map import Box, CheckpointMap, Concat, InHalves, Rows, Source, Tensor
from jaxllm.parallel.sharding import Axes, Part, num_pieces, sharding
from jaxllm.quantization.linear import CodedLinear

_TOWER = "tower"  # the module of a model
# The arrays of all layers that adapters may change, by the layers' names.
Adapters = dict[str, LowRank]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A linear layer of a model that adapters may change."""

    name: str
    num_inputs: int
    axes: Axes  # of the weight, [out, in]
    parts: tuple[Part, ...]  # that it is fused of; of a layer that is not, the one
    # The checkpoint's layer of each part; parts may be rows of one.
    layers: tuple[str, ...]

    def pieces(self, num_columns: int) -> tuple[tuple[int, int], ...]:
        return tuple((part.rows, num_columns) for part in self.parts)

    def abstract(self, num_slots: int, rank: int, dtype: Any, mesh: Mesh) -> LowRank:
        """The shapes and shardings of its arrays."""
        num_shards = num_pieces(mesh, self.axes[:1])
        out_axis, in_axis = self.axes

        def shape(sizes: tuple[int, ...], axes: Axes) -> Any:
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding(mesh, axes))

        return LowRank(
            a=shape(
                (num_slots, len(self.parts), rank, self.num_inputs), (None, None, None, in_axis)
            ),
            b=tuple(
                shape(
                    (num_slots, rank, num_shards, part.rows * part.copies // num_shards),
                    (None, None, out_axis, None),
                )
                for part in self.parts
            ),
        )


@dataclass(frozen=True)
class AdapterArrays:
    """The arrays of a part of a model for its slots of adapters."""

    targets: tuple[Target, ...]
    names: CheckpointMap
    num_slots: int
    rank: int
    dtype: Any
    mesh: Mesh

    @classmethod
    def of(
        cls, model: Model, *, num_slots: int, rank: int, dtype: Any, mesh: Mesh
    ) -> "AdapterArrays":
        names = model.checkpoint_map
        return cls(tuple(targets_of(model)), names, num_slots, rank, dtype, mesh)

    def abstract(self) -> Adapters:
        """The shapes, for compiling and planning."""
        return {
            target.name: target.abstract(self.num_slots, self.rank, self.dtype, self.mesh)
            for target in self.targets
        }

    def abstract_one(self) -> Adapters:
        """The shapes of one adapter, as `lay_out` makes it."""
        one = dataclasses.replace(self, num_slots=1).abstract()
        return jax.tree.map(
            lambda its: jax.ShapeDtypeStruct(its.shape[1:], its.dtype, sharding=_rest(its)), one
        )

    def lay_out(self, adapter: Mapping[str, Matrices]) -> Adapters:
        """Arrange an adapter's matrices as a slot has them; numpy arrays."""
        others = _other_names(self.names, self.targets)
        adapter = {others.get(layer, layer): its for layer, its in adapter.items()}
        return {target.name: self._of_target(target, adapter) for target in self.targets}

    def placed(self, one: Adapters) -> Adapters:
        """What `lay_out` has made, as an argument of a program: over several hosts, on the devices
        of each the parts that these have."""
        if not self.mesh.is_multi_process:
            return one
        return jax.tree.map(
            lambda about, its: jax.make_array_from_callback(
                about.shape, about.sharding, its.__getitem__
            ),
            self.abstract_one(),
            one,
        )

    def _of_target(self, target: Target, adapter: Mapping[str, Matrices]) -> LowRank:
        num_shards = num_pieces(self.mesh, target.axes[:1])
        a = np.zeros((len(target.parts), self.rank, target.num_inputs), self.dtype)
        for part, layer in enumerate(target.layers):
            if layer in adapter:
                matrix = adapter[layer].a
                a[part, : len(matrix)] = matrix
        # What a family does with the rows of a weight it does with those of B.
        source = self.names.source(f"{target.name}.weight", target.pieces(self.rank))
        whole = np.zeros(source.shape, self.dtype)
        if any(layer in adapter for layer in target.layers):
            source.copy(_Columns(adapter), tuple(slice(0, size) for size in whole.shape), whole)
        b, first = [], 0
        for part in target.parts:
            rows = whole[first : first + part.rows]
            cut = rows.reshape(num_shards // part.copies, -1, self.rank)
            b.append(np.repeat(cut, part.copies, axis=0).transpose(2, 0, 1))
            first += part.rows
        arrays: Any = a, tuple(map(np.ascontiguousarray, b))  # numpy's, until they are uploaded
        return LowRank(*arrays)


def targets_of(model: Any) -> Iterator[Target]:
    """The linear layers of an abstract model that adapters may change, of any storage: those of the
    decoder. A tower's run before the step, and its outputs are shared by requests. A router's
    product is a part of its choice of experts."""
    names: CheckpointMap = model.checkpoint_map
    for path, module in nnx.iter_graph(model):
        if not isinstance(module, Linear | CodedLinear) or isinstance(module, Router):
            continue
        if path[0] == _TOWER:
            continue
        name = ".".join(map(str, path))
        weight: Any = module.weight  # pyright: ignore[reportAttributeAccessIssue]
        about = weight.get_metadata()
        stored = about.get("stored")
        num_inputs = weight.shape[-1] if stored is None else stored.num_inputs
        parts = tuple(about.get("parts") or ()) or (Part(about.get("rows", weight.shape[-2])),)
        target = Target(
            name=name, num_inputs=num_inputs, axes=about["axes"], parts=parts, layers=()
        )
        layers = _layers_of(names.source(f"{name}.weight", target.pieces(num_inputs)), len(parts))
        if layers is not None:
            yield dataclasses.replace(target, layers=layers)


def adaptable_layers(model: Any) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the layers that adapters may change, by their names in checkpoints of
    every layout."""
    names: CheckpointMap = model.checkpoint_map
    targets = tuple(targets_of(model))
    sizes: dict[str, tuple[int, int]] = {}
    for target in targets:
        source = names.source(f"{target.name}.weight", target.pieces(target.num_inputs))
        for rows in source.rows():
            layer = rows.tensor.name.removesuffix(".weight")
            sizes[layer] = (target.num_inputs, rows.tensor.shape[0])
    others = _other_names(names, targets)
    return sizes | {other: sizes[layer] for other, layer in others.items()}


def adapted(model: Any, adapters: Adapters, slots: jax.Array, op: LowRankOp) -> Any:
    """Replace the layers of a model, in place, by layers that add each token's adapter. `slots`,
    i32 [T], has that of each token."""
    for name, weights in adapters.items():
        *path, leaf = name.split(".")
        parent: Any = functools.reduce(
            lambda module, step: module[int(step)] if step.isdigit() else getattr(module, step),
            path,
            model,
        )
        setattr(parent, leaf, AdaptedLinear(getattr(parent, leaf), weights, slots, op))
    return model


class AdaptedLinear(nnx.Module):
    """A linear layer and what adapters add to it. Without an adapter a token gets exactly what the
    layer gives it."""

    def __init__(self, base: Any, weights: LowRank, slots: jax.Array, op: LowRankOp):
        self.base = base
        self.op = op
        self.a = nnx.Param(weights.a)
        self.b = nnx.List(nnx.Param(b) for b in weights.b)
        self.slots = nnx.Variable(slots)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.base(x)
        with jax.named_scope("adapter"):
            weights = LowRank(self.a[...], tuple(b[...] for b in self.b))
            added = self.op(x, weights, self.slots[...])
        return (y.astype(jnp.float32) + added).astype(y.dtype)


def write_adapter(adapters: Adapters, slot: jax.Array, one: Adapters) -> Adapters:
    """Put an adapter into a slot; traced."""
    return jax.tree.map(lambda its, new: its.at[slot].set(new), adapters, one)


def adapters_bytes(adapters: Adapters) -> int:
    """The bytes of the arrays on each device."""
    return sum(
        math.prod(its.sharding.shard_shape(its.shape)) * np.dtype(its.dtype).itemsize
        for its in jax.tree.leaves(adapters)
    )


class _Columns:
    """B matrices as the tensors of a checkpoint; what is missing is zeros."""

    def __init__(self, adapter: Mapping[str, Matrices]):
        self._adapter = adapter

    def copy(self, name: str, box: Box, target: np.ndarray, kind: str = "float") -> None:
        target[...] = 0
        its = self._adapter.get(name.removesuffix(".weight"))
        if its is not None:
            rows, columns = box
            given = its.b[rows, columns.start : columns.stop]
            target[:, : given.shape[1]] = given


def _layers_of(source: Source, num_parts: int) -> tuple[str, ...] | None:
    """The checkpoint's layer of each part of a weight. None: it is not made of whole rows of one
    layer for each part, so no adapter can follow."""
    sources: Sequence[Source] = (source,) * num_parts
    if isinstance(source, Concat) and len(source.sources) == num_parts:
        sources = source.sources
    layers = []
    for one in sources:
        names = {rows.tensor.name for rows in one.rows()}
        if not _is_of_rows(one) or len(names) != 1:
            return None
        layers.append(names.pop().removesuffix(".weight"))
    return tuple(layers)


def _is_of_rows(source: Source) -> bool:
    if isinstance(source, Concat):
        return all(map(_is_of_rows, source.sources))
    if isinstance(source, InHalves):
        return _is_of_rows(source.source)
    return isinstance(source, Tensor | Rows)


def _other_names(names: CheckpointMap, targets: Sequence[Target]) -> dict[str, str]:
    """The layers' names in other layouts -> in the first one."""
    found = {}
    for target in targets:
        for first, *others in names.modules(
            f"{target.name}.weight", target.pieces(target.num_inputs)
        ):
            found |= {other: first for other in others if other != first}
    return found


def _rest(array: Any) -> Any:
    """The sharding of an array without its first axis."""
    spec = array.sharding.spec
    return jax.sharding.NamedSharding(array.sharding.mesh, jax.sharding.PartitionSpec(*spec[1:]))
