"""Fills a model's parameters from a checkpoint. Each tensor and parameter is used exactly once.

Parameters are made one after the other, and pages of a file are released once they are copied. So
host memory holds at most one parameter beside the ones that stay there.
"""

import functools
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.logging import init_logger
from jaxllm.models.base import Model
from jaxllm.models.checkpoint_map import CheckpointMap, Rows, Source, Stored
from jaxllm.models.draft_head import DraftHead
from jaxllm.parallel.sharding import Axes, Part, make_mesh, num_pieces, sharding
from jaxllm.plural import counted
from jaxllm.weights.checkpoint import (
    TYPES,
    OpenCheckpoint,
    open_checkpoint,
    row_slices,
    some_of,
)

logger = init_logger(__name__)

_DUMMY_PERIOD = 1_000_003  # a prime, so that no two rows of a matrix are equal


def load_weights(
    model_dir: Path,
    abstract_model: Model,
    *,
    mesh: Mesh | None = None,
    load_format: Literal["auto", "safetensors", "dummy"] = "auto",
    seed: int = 0,
) -> nnx.State:
    """Load the arrays of an abstract model from its directory, or make random ones ("dummy").

    The arrays are sharded over the mesh (default: the first device) by their axes. A process reads
    only the parts of the checkpoint that go to its own devices.
    """
    part = (abstract_model, mesh or make_mesh(jax.devices()[:1]))
    (state,) = load_parts(model_dir, [part], load_format=load_format, seed=seed)
    return state


def load_parts(
    model_dir: Path,
    parts: Sequence[tuple[Model | DraftHead, Mesh]],
    *,
    load_format: Literal["auto", "safetensors", "dummy"] = "auto",
    seed: int = 0,
) -> list[nnx.State]:
    """Load a model in parts, each on its own mesh. Together the parts use the tensors of the whole
    model, and every parameter has the same values as in the whole model."""
    parameters = [parameters_of(abstract_model) for abstract_model, _ in parts]
    if load_format == "dummy":
        arrays = [
            {name: _dummy(name, p, mesh, seed) for name, p in of_part.items()}
            for of_part, (_, mesh) in zip(parameters, parts, strict=True)
        ]
    else:
        names = parts[0][0].checkpoint_map
        with open_checkpoint(model_dir, names.folders) as checkpoint:
            names = names.for_tensors({name: its.shape for name, its in checkpoint.tensors.items()})
            sources = [sources_of(of_part, names) for of_part in parameters]
            _check_names(checkpoint, sources, names)
            _check_shapes(checkpoint, sources)
            _check_types(checkpoint, sources)
            arrays = [
                {
                    name: _load(checkpoint, its_sources.get(name), p, mesh)
                    for name, p in of_part.items()
                }
                for of_part, its_sources, (_, mesh) in zip(parameters, sources, parts, strict=True)
            ]
    return [
        _as_state(abstract_model, of_part)
        for (abstract_model, _), of_part in zip(parts, arrays, strict=True)
    ]


def weights_bytes(abstract_model: Model | nnx.Module, mesh: Mesh) -> int:
    """The bytes of a model's parameters on each device of a mesh."""
    return sum(
        p.size * p.dtype.itemsize // num_pieces(mesh, p.axes)
        for p in parameters_of(abstract_model).values()
    )


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """Shape, dtype and metadata of one of a model's arrays."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: Axes
    parts: tuple[Part, ...]
    rows: int  # without padding
    columns: int | None = None  # without padding; None: the shape has no columns of padding
    stored: Stored | None = None
    constant: float | None = None  # of all elements, in place of a checkpoint's; None: see `stored`

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def pieces(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the fused tensors; if nothing is fused, its own shape without padding."""
        rows = [part.rows for part in self.parts] or [self.rows]
        others = self.shape[1:] if self.columns is None else (self.columns,)
        return tuple((count, *others) for count in rows)


def abstract_weights(abstract_model: Model | nnx.Module, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """Shapes and shardings of the arrays, in the order of the state's leaves."""
    return [
        jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding(mesh, p.axes))
        for p in parameters_of(abstract_model).values()
    ]


def parameters_of(abstract_model: Model | nnx.Module) -> dict[str, Parameter]:
    """Dotted name -> parameter, in the order of the state's leaves."""
    leaves = jax.tree.leaves_with_path(
        nnx.state(abstract_model), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    return {
        ".".join(str(key.key) for key in path): Parameter(
            shape=leaf.shape,
            dtype=np.dtype(leaf.dtype),
            axes=leaf.get_metadata().get("axes", ()),
            parts=leaf.get_metadata().get("parts", ()),
            rows=leaf.get_metadata().get("rows", leaf.shape[0]),
            columns=leaf.get_metadata().get("columns"),
            stored=leaf.get_metadata().get("stored"),
            constant=leaf.get_metadata().get("constant"),
        )
        for path, leaf in leaves
    }


def sources_of(parameters: Mapping[str, Parameter], names: CheckpointMap) -> dict[str, Source]:
    """The source of each parameter in a checkpoint, except those that have constant values."""
    return {
        name: names.source(name, p.pieces, p.stored)
        for name, p in parameters.items()
        if p.constant is None
    }


def _as_state(abstract_model: Model | nnx.Module, arrays: dict[str, jax.Array]) -> nnx.State:
    leaves, treedef = jax.tree.flatten(nnx.state(abstract_model))
    assert len(leaves) == len(arrays), (len(leaves), len(arrays))
    return jax.tree.unflatten(treedef, list(arrays.values()))


def _check_names(
    checkpoint: OpenCheckpoint, sources: Sequence[Mapping[str, Source]], names: CheckpointMap
) -> None:
    """Raise unless every tensor and every parameter is used exactly once. Two parts may share a
    tied embedding."""
    of_parts = {name: source for part in sources for name, source in part.items()}
    counts = Counter(name for part in sources for name in part)
    shared = {name for name, count in counts.items() if count > 1}
    assert shared <= set(names.copies.values()), f"two parts have {shared}"
    used: dict[str, list[Rows]] = {}
    for source in of_parts.values():
        for rows in source.rows():
            used.setdefault(rows.tensor.name, []).append(rows)
    missing = [name for name in used if name not in checkpoint.tensors]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of the {len(used)} tensors that config.json "
            f"asks for: {some_of(missing)}"
        )
    extra = [name for name in checkpoint.tensors.keys() - used if not names.is_ignored(name)]
    copies = names.copied_tensors
    unknown = sorted(name for name in extra if name not in copies)
    if unknown:
        raise CheckpointError(
            f"the checkpoint has {counted(len(unknown), 'tensor')} that config.json has no place "
            f"for: {some_of(unknown)}; config and weights disagree"
        )
    for rows in used.values():
        _check_rows(rows)
    _log_ignored(checkpoint, checkpoint.tensors.keys() - used.keys(), names)
    for name in extra:
        if not _equal(checkpoint, name, copies[name]):
            raise CheckpointError(
                f"config.json ties {name} to {copies[name]}, but the checkpoint has "
                "different tensors of these names; if they are meant to differ, use "
                "hf_overrides={'tie_word_embeddings': False}"
            )


def _log_ignored(checkpoint: OpenCheckpoint, unused: set[str], names: CheckpointMap) -> None:
    ignored = sorted(name for name in unused if names.is_ignored(name))
    if ignored:
        size = sum(checkpoint.tensors[name].num_bytes for name in ignored)
        logger.info(
            "left out %s of the checkpoint (%.2f GiB), which this model does not use: %s",
            counted(len(ignored), "tensor"),
            size / 2**30,
            some_of(ignored),
        )


def _check_rows(used: list[Rows]) -> None:
    """Assert that a family's map uses each row of a tensor exactly once."""
    end, tensor = 0, used[0].tensor
    for rows in sorted(used, key=lambda rows: rows.first):
        assert rows.tensor == tensor and rows.first == end, f"{tensor.name}: {used}"
        end = rows.end
    assert end == (tensor.shape[0] if tensor.shape else 1), f"{tensor.name}: {used}"


def _check_shapes(checkpoint: OpenCheckpoint, sources: Sequence[Mapping[str, Source]]) -> None:
    """Compare every tensor's shape with config.json, before any data is read."""
    asked = {
        rows.tensor: checkpoint.tensors[rows.tensor.name].shape
        for of_part in sources
        for source in of_part.values()
        for rows in source.rows()
    }
    wrong = [
        f"{tensor.name} {tensor.shape}, where the checkpoint has {shape}"
        for tensor, shape in asked.items()
        if shape != tensor.shape
    ]
    if wrong:
        raise CheckpointError(
            f"config and weights disagree in {counted(len(wrong), 'shape')}; config.json asks for "
            f"{wrong[0]}"
        )


def _check_types(checkpoint: OpenCheckpoint, sources: Sequence[Mapping[str, Source]]) -> None:
    """Compare every tensor's type with config.json: codes are not taken for weights."""
    for of_part in sources:
        for source in of_part.values():
            for rows in source.rows():
                tensor, info = rows.tensor, checkpoint.tensors[rows.tensor.name]
                if info.dtype not in TYPES[tensor.kind]:
                    raise UnsupportedModelError(
                        f"tensor {tensor.name} in {info.file.name} is stored as {info.dtype}; "
                        f"config.json asks for {' or '.join(TYPES[tensor.kind])}"
                    )


def _constant(parameter: Parameter, mesh: Mesh) -> jax.Array:
    values = np.full(parameter.shape, parameter.constant, parameter.dtype)
    place = sharding(mesh, parameter.axes)
    return jax.make_array_from_callback(parameter.shape, place, values.__getitem__)


def _load(
    checkpoint: OpenCheckpoint, source: Source | None, parameter: Parameter, mesh: Mesh
) -> jax.Array:
    if source is None:
        return _constant(parameter, mesh)
    array = jax.make_array_from_callback(
        parameter.shape,
        sharding(mesh, parameter.axes),
        functools.partial(
            _read, checkpoint, source, parameter, num_pieces(mesh, parameter.axes[:1])
        ),
    )
    # Wait, so that pending copies to the devices do not pile up in host memory.
    return array.block_until_ready()


def _read(
    checkpoint: OpenCheckpoint,
    source: Source,
    parameter: Parameter,
    num_shards: int,
    index: tuple[slice, ...] | None,
) -> np.ndarray:
    """Read a box of a parameter. A box of a fused parameter, cut by rows, has whole shards."""
    whole = (slice(None),) * len(parameter.shape)
    edges = zip(index or whole, parameter.shape, strict=True)
    box = tuple(slice(*cut.indices(size)[:2]) for cut, size in edges)
    values = np.zeros([cut.stop - cut.start for cut in box], parameter.dtype)
    others, filled = box[1:], values
    if parameter.columns is not None:
        (columns,) = others
        others = (slice(columns.start, min(columns.stop, parameter.columns)),)
        filled = values[:, : others[0].stop - columns.start]
    for target, rows in _places(parameter, num_shards, box[0]):
        source.copy(checkpoint, (rows, *others), filled[target])
    return values


def _places(parameter: Parameter, num_shards: int, box: slice) -> Iterator[tuple[slice, slice]]:
    """Yield pairs (rows of the box, rows of the source). The rest of the box is padding."""
    if not parameter.parts:
        end = min(box.stop, parameter.rows)
        if box.start < end:
            yield slice(0, end - box.start), slice(box.start, end)
        return
    shard_rows = parameter.shape[0] // num_shards
    assert box.start % shard_rows == box.stop % shard_rows == 0, (box, parameter)
    filled = 0
    for shard in range(box.start // shard_rows, box.stop // shard_rows):
        first = 0  # of the part, in the source
        for part in parameter.parts:
            rows = part.rows * part.copies // num_shards
            start = first + shard // part.copies * rows
            yield slice(filled, filled + rows), slice(start, start + rows)
            filled += rows
            first += part.rows
    assert filled == box.stop - box.start, (filled, box, parameter)


def _equal(checkpoint: OpenCheckpoint, first: str, second: str) -> bool:
    if checkpoint.tensors[first].shape != checkpoint.tensors[second].shape:
        return False
    a, b = checkpoint.read(first), checkpoint.read(second)
    return all(np.array_equal(a[rows], b[rows]) for rows in row_slices(a))


def _dummy(name: str, parameter: Parameter, mesh: Mesh, seed: int) -> jax.Array:
    # The values repeat, because random bits for a whole model would take longer than reading it.
    # They are small, so that activations of a deep model stay finite in every dtype. The name is
    # part of the seed, so that they do not depend on how the model is cut.
    if parameter.constant is not None:
        return _constant(parameter, mesh)
    count = min(parameter.size, _DUMMY_PERIOD)
    random = np.random.default_rng((seed % 2**32, zlib.crc32(name.encode())))
    largest = 0.05 if parameter.stored is None else parameter.stored.largest
    if parameter.dtype == np.uint8:  # two codes in each
        values = random.integers(0, 256, count, np.uint8)
    else:
        values = 2 * largest * (random.random(count, np.float32) - 0.5)
    if parameter.dtype == ml_dtypes.float8_e8m0fnu:
        values = np.maximum(abs(values), largest / 64)  # powers of two have no sign
    shape = parameter.shape
    if parameter.columns is not None:
        shape = (*shape[:-1], parameter.columns)
    values = np.resize(values.astype(parameter.dtype), shape)
    others = [(0, all_of - its) for all_of, its in zip(parameter.shape, shape, strict=True)]
    values = np.pad(values, others) if shape != parameter.shape else values
    place = sharding(mesh, parameter.axes)
    return jax.make_array_from_callback(parameter.shape, place, values.__getitem__)
