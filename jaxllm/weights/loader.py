"""Fills a model's parameters from a checkpoint, using every tensor and parameter exactly once.

Parameters are made one after the other, so that beside what is kept there is at most one of them
in memory.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from jaxllm.errors import CheckpointError
from jaxllm.models.checkpoint_names import CheckpointNames
from jaxllm.models.decoder import DecoderForCausalLM
from jaxllm.weights.checkpoint import Checkpoint, some_of

_COMPARED_AT_ONCE = 1 << 22  # elements
_DUMMY_PERIOD = 1_000_003  # a prime: no two rows of a matrix are equal


def load_weights(
    model_dir: Path,
    abstract_model: DecoderForCausalLM,
    *,
    load_format: Literal["auto", "safetensors", "dummy"] = "auto",
    seed: int = 0,
) -> nnx.State:
    """The arrays for an abstract model, from its directory, or random ones ("dummy")."""
    parameters = _parameters(abstract_model)
    if load_format == "dummy":
        arrays = {
            name: jax.device_put(_random((seed % 2**32, index), p))
            for index, (name, p) in enumerate(parameters.items())
        }
    else:
        with Checkpoint(model_dir) as checkpoint:
            names = abstract_model.checkpoint_names
            _check_names(checkpoint, parameters, names)
            _check_shapes(checkpoint, parameters, names)
            arrays = {
                name: jax.device_put(_read(checkpoint, p, names.sources(name)))
                for name, p in parameters.items()
            }
    state = nnx.state(abstract_model)
    leaves, treedef = jax.tree.flatten(state)
    assert len(leaves) == len(arrays), (len(leaves), len(arrays))
    return jax.tree.unflatten(treedef, list(arrays.values()))


def weights_bytes(abstract_model: nnx.Module) -> int:
    """What the parameters of a model take."""
    return sum(p.size * p.dtype.itemsize for p in _parameters(abstract_model).values())


def _parameters(abstract_model: nnx.Module) -> dict[str, jax.ShapeDtypeStruct]:
    """Dotted name -> shape and type, in the order of the state's leaves."""
    leaves = jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(abstract_model)))
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def _check_names(
    checkpoint: Checkpoint, parameters: dict[str, Any], names: CheckpointNames
) -> None:
    """Every tensor and every parameter is used exactly once, or we say which is not."""
    wanted = [source for name in parameters for source in names.sources(name)]
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
            f"the checkpoint has {len(unknown)} tensors that config.json has no place for: "
            f"{some_of(unknown)}; config and weights disagree"
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
    parameters: dict[str, jax.ShapeDtypeStruct],
    names: CheckpointNames,
) -> None:
    """Before any data is read: does what is concatenated make what config.json says?"""
    wrong = []
    for name, parameter in parameters.items():
        sources = names.sources(name)
        shapes = [checkpoint.tensors[source].shape for source in sources]
        rows = sum(shape[0] if shape else 0 for shape in shapes)
        if {(rows, *shape[1:]) for shape in shapes} != {parameter.shape}:
            found = map("{} {}".format, sources, shapes)
            wrong.append(f"{name} {parameter.shape}, where the checkpoint has {' + '.join(found)}")
    if wrong:
        raise CheckpointError(
            f"config and weights disagree in {len(wrong)} shapes; config.json asks for {wrong[0]}"
        )


def _read(
    checkpoint: Checkpoint, parameter: jax.ShapeDtypeStruct, sources: tuple[str, ...]
) -> np.ndarray:
    array = np.empty(parameter.shape, parameter.dtype)
    start = 0
    for source in sources:
        tensor = checkpoint.read(source)
        array[start : start + len(tensor)] = tensor
        checkpoint.release(source)
        start += len(tensor)
    assert start == len(array), (sources, start, len(array))
    return array


def _equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    if checkpoint.tensors[first].shape != checkpoint.tensors[second].shape:
        return False
    a, b = checkpoint.read(first), checkpoint.read(second)
    return all(np.array_equal(a[rows], b[rows]) for rows in _row_slices(a))


def _row_slices(array: np.ndarray) -> Iterator[slice]:
    step = max(1, _COMPARED_AT_ONCE // max(1, array[0].size))
    return (slice(start, start + step) for start in range(0, len(array), step))


def _random(seed: tuple[int, int], parameter: jax.ShapeDtypeStruct) -> np.ndarray:
    # Random bits for a whole model would take longer than reading it, so they repeat. And small,
    # so that activations of a deep model stay finite in every type.
    count = min(parameter.size, _DUMMY_PERIOD)
    values = 0.1 * (np.random.default_rng(seed).random(count, np.float32) - 0.5)
    return np.resize(values.astype(parameter.dtype), parameter.shape)
