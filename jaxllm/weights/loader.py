"""Fills a model's parameters from a checkpoint, using every tensor and parameter exactly once.

Parameters are made one after the other, and what of a file has been copied is let go, so that
beside what is kept there is at most one of them in memory.
"""

import functools
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.errors import CheckpointError
from jaxllm.models.checkpoint_names import CheckpointNames
from jaxllm.models.decoder import DecoderForCausalLM
from jaxllm.parallel.sharding import Axes, Part, is_cut, make_mesh, sharding
from jaxllm.plural import counted
from jaxllm.weights.checkpoint import Checkpoint, some_of

_ELEMENTS_AT_ONCE = 1 << 22  # that are read or compared
_DUMMY_PERIOD = 1_000_003  # a prime: no two rows of a matrix are equal


def load_weights(
    model_dir: Path,
    abstract_model: DecoderForCausalLM,
    *,
    mesh: Mesh | None = None,
    load_format: Literal["auto", "safetensors", "dummy"] = "auto",
    seed: int = 0,
) -> nnx.State:
    """The arrays for an abstract model, from its directory, or random ones ("dummy").

    They lie on the mesh (default: the first device) as their axes say, and of the checkpoint only
    what goes to devices of this process is read.
    """
    part = (abstract_model, mesh or make_mesh(jax.devices()[:1]))
    (state,) = load_parts(model_dir, [part], load_format=load_format, seed=seed)
    return state


def load_parts(
    model_dir: Path,
    parts: Sequence[tuple[DecoderForCausalLM, Mesh]],
    *,
    load_format: Literal["auto", "safetensors", "dummy"] = "auto",
    seed: int = 0,
) -> list[nnx.State]:
    """The same for a model in parts, each on a mesh of its own: together they use what the whole
    would use, and each gets what it would have there."""
    parameters = [parameters_of(abstract_model) for abstract_model, _ in parts]
    if load_format == "dummy":
        arrays = [
            {name: _dummy(name, p, mesh, seed) for name, p in of_part.items()}
            for of_part, (_, mesh) in zip(parameters, parts, strict=True)
        ]
    else:
        names = parts[0][0].checkpoint_names
        with Checkpoint(model_dir) as checkpoint:
            _check_names(checkpoint, parameters, names)
            for of_part in parameters:
                _check_shapes(checkpoint, of_part, names)
            arrays = [
                {
                    name: _load(checkpoint, names.sources(name), p, mesh)
                    for name, p in of_part.items()
                }
                for of_part, (_, mesh) in zip(parameters, parts, strict=True)
            ]
    return [
        _as_state(abstract_model, of_part)
        for (abstract_model, _), of_part in zip(parts, arrays, strict=True)
    ]


def weights_bytes(abstract_model: nnx.Module, num_shards: int = 1) -> int:
    """What the parameters of a model take on each of so many devices."""
    return sum(
        p.size * p.dtype.itemsize // (num_shards if is_cut(p.axes) else 1)
        for p in parameters_of(abstract_model).values()
    )


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What a model says of one of its arrays."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: Axes
    parts: tuple[Part, ...]
    rows: int  # without padding

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def abstract_weights(abstract_model: nnx.Module, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """Shapes and places of the arrays, in the order of the state's leaves."""
    return [
        jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding(mesh, p.axes))
        for p in parameters_of(abstract_model).values()
    ]


def parameters_of(abstract_model: nnx.Module) -> dict[str, Parameter]:
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
        )
        for path, leaf in leaves
    }


def _as_state(abstract_model: nnx.Module, arrays: dict[str, jax.Array]) -> nnx.State:
    leaves, treedef = jax.tree.flatten(nnx.state(abstract_model))
    assert len(leaves) == len(arrays), (len(leaves), len(arrays))
    return jax.tree.unflatten(treedef, list(arrays.values()))


def _check_names(
    checkpoint: Checkpoint, parts: Sequence[dict[str, Parameter]], names: CheckpointNames
) -> None:
    """Every tensor and every parameter is used exactly once, or we say which is not. Two parts may
    share what serves twice: a tied embedding."""
    of_parts = Counter(name for parameters in parts for name in parameters)
    shared = {name for name, count in of_parts.items() if count > 1}
    assert shared <= set(names.copies.values()), f"two parts have {shared}"
    wanted = [source for name in of_parts for source in names.sources(name)]
    missing = [name for name in wanted if name not in checkpoint.tensors]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of the {len(wanted)} tensors that config.json "
            f"asks for: {some_of(missing)}"
        )
    extra = [name for name in checkpoint.tensors.keys() - set(wanted) if not names.is_ignored(name)]
    unknown = sorted(name for name in extra if name not in names.copies)
    if unknown:
        raise CheckpointError(
            f"the checkpoint has {counted(len(unknown), 'tensor')} that config.json has no place "
            f"for: {some_of(unknown)}; config and weights disagree"
        )
    assert len(wanted) == len(set(wanted)), "a tensor is named twice"
    for name in extra:
        if not _equal(checkpoint, name, names.copies[name]):
            raise CheckpointError(
                f"config.json ties {name} to {names.copies[name]}, but the checkpoint has "
                "different tensors of these names; if they are meant to differ, use "
                "hf_overrides={'tie_word_embeddings': False}"
            )


def _check_shapes(
    checkpoint: Checkpoint,
    parameters: dict[str, Parameter],
    names: CheckpointNames,
) -> None:
    """Before any data is read: is every tensor what config.json says?"""
    wrong = []
    for name, parameter in parameters.items():
        rows = [part.rows for part in parameter.parts] or [parameter.rows]
        assert len(rows) == len(names.sources(name)), f"{name} does not say what it is fused of"
        for source, count in zip(names.sources(name), rows, strict=True):
            shape, wanted = checkpoint.tensors[source].shape, (count, *parameter.shape[1:])
            if shape != wanted:
                wrong.append(f"{source} {wanted}, where the checkpoint has {shape}")
    if wrong:
        raise CheckpointError(
            f"config and weights disagree in {counted(len(wrong), 'shape')}; config.json asks for "
            f"{wrong[0]}"
        )


def _load(
    checkpoint: Checkpoint, sources: tuple[str, ...], parameter: Parameter, mesh: Mesh
) -> jax.Array:
    tensors = tuple(_Source(checkpoint, source) for source in sources)
    array = jax.make_array_from_callback(
        parameter.shape,
        sharding(mesh, parameter.axes),
        functools.partial(_read, parameter, tensors, mesh.size),
    )
    # Else copies would be on their way to the devices, and in memory, as many as there is time for.
    return array.block_until_ready()


class _Source:
    """A tensor of a checkpoint, copied piece by piece."""

    def __init__(self, checkpoint: Checkpoint, name: str):
        self._checkpoint, self._name = checkpoint, name
        self._tensor = checkpoint.read(name)

    def copy(self, target: np.ndarray, rows: slice, columns: tuple[slice, ...]) -> None:
        """Fill the target's head with what there is of these rows and columns."""
        found = self._tensor[rows, *columns]
        target = target[: len(found)]
        for some in _row_slices(found):
            target[some] = found[some]
            self._checkpoint.release(self._name)


def _read(
    parameter: Parameter,
    sources: tuple[_Source, ...],
    num_shards: int,
    index: tuple[slice, ...] | None,
) -> np.ndarray:
    """A piece of a parameter: of one that is cut by rows, whole shards."""
    index = index or ()
    first, last = index[0].indices(parameter.shape[0])[:2] if index else (0, 0)
    columns = index[1:]
    widths = [
        len(range(*cut.indices(size)))
        for cut, size in zip(columns, parameter.shape[1:], strict=True)
    ]
    values = np.zeros((last - first, *widths), parameter.dtype)
    if not parameter.parts:
        (source,) = sources
        source.copy(values, slice(first, last), columns)  # the rest is padding
        return values
    shard_rows = parameter.shape[0] // num_shards
    assert first % shard_rows == last % shard_rows == 0, (index, parameter)
    filled = 0
    for shard in range(first // shard_rows, last // shard_rows):
        for part, source in zip(parameter.parts, sources, strict=True):
            rows = part.rows * part.copies // num_shards
            start = shard // part.copies * rows
            source.copy(values[filled:], slice(start, start + rows), columns)
            filled += rows
    assert filled == len(values), (filled, index, parameter)
    return values


def _equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    if checkpoint.tensors[first].shape != checkpoint.tensors[second].shape:
        return False
    a, b = checkpoint.read(first), checkpoint.read(second)
    return all(np.array_equal(a[rows], b[rows]) for rows in _row_slices(a))


def _row_slices(array: np.ndarray) -> Iterator[slice]:
    step = max(1, _ELEMENTS_AT_ONCE // max(1, math.prod(array.shape[1:])))
    return (slice(start, start + step) for start in range(0, len(array), step))


def _dummy(name: str, parameter: Parameter, mesh: Mesh, seed: int) -> jax.Array:
    # Random bits for a whole model would take longer than reading it, so they repeat. And small,
    # so that activations of a deep model stay finite in every type. Drawn by name, so that they are
    # the same however the model is cut.
    count = min(parameter.size, _DUMMY_PERIOD)
    random = np.random.default_rng((seed % 2**32, zlib.crc32(name.encode())))
    values = 0.1 * (random.random(count, np.float32) - 0.5)
    values = np.resize(values.astype(parameter.dtype), parameter.shape)
    place = sharding(mesh, parameter.axes)
    return jax.make_array_from_callback(parameter.shape, place, values.__getitem__)
