"""Weights on disk as an engine holds them: cut, fused and in codes, in an orbax checkpoint.

`jaxllm convert` writes them, and `--load-format orbax` reads them: each process its own shards
only, without unpacking. What the arrays are follows from the plan, so a file beside them has all
that determines them, and an engine for which that differs is refused.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.errors import CheckpointError, ValidationError
from jaxllm.files import read_json
from jaxllm.models.base import Model
from jaxllm.parallel.sharding import partition_spec, sharding
from jaxllm.weights.loader import Parameter, parameters_of

_VERSION = 1
_FACTS = "engine_weights.json"
_ARRAYS = "engine_weights"
_MAX_FACTS_BYTES = 64 << 20

Parts = Sequence[tuple[Model, Mesh]]


def save(directory: Path, parts: Parts, states: Sequence[nnx.State]) -> None:
    """Write the weights of all parts of a model into its directory, which has its config.json."""
    checkpointer = _checkpointer()
    checkpointer.save((directory / _ARRAYS).resolve(), _tree(parts, states))
    checkpointer.wait_until_finished()
    facts = json.dumps(_facts(parts), indent=1) + "\n"
    (directory / _FACTS).write_text(facts, encoding="utf-8")


def load(directory: Path, parts: Parts) -> list[nnx.State]:
    """Read the weights of all parts; raise if they were written for another engine."""
    if not (directory / _FACTS).exists():
        raise CheckpointError(
            f"{directory} has no {_FACTS}; load_format='orbax' reads what `jaxllm convert` writes"
        )
    _check(directory, read_json(directory / _FACTS, most=_MAX_FACTS_BYTES), _facts(parts))
    abstract = [
        {
            name: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding(mesh, p.axes))
            for name, p in parameters_of(model).items()
        }
        for model, mesh in parts
    ]
    try:
        arrays = _checkpointer().restore(
            (directory / _ARRAYS).resolve(), {_of_part(i): its for i, its in enumerate(abstract)}
        )
    except Exception as error:  # orbax and its storage raise what they like
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{directory / _ARRAYS} cannot be read: {reason:.300}") from error
    states = []
    for index, (model, _) in enumerate(parts):
        leaves = [arrays[_of_part(index)][name] for name in parameters_of(model)]
        states.append(jax.tree.unflatten(jax.tree.structure(nnx.state(model)), leaves))
    return states


def _tree(parts: Parts, states: Sequence[nnx.State]) -> dict[str, dict[str, jax.Array]]:
    return {
        _of_part(index): dict(zip(parameters_of(model), jax.tree.leaves(state), strict=True))
        for index, ((model, _), state) in enumerate(zip(parts, states, strict=True))
    }


def _of_part(index: int) -> str:
    return f"stage{index}"


def _facts(parts: Parts) -> dict[str, Any]:
    """All that determines the arrays."""
    return {
        "version": _VERSION,
        "pipeline_parallel_size": len(parts),
        "tensor_parallel_size": parts[0][1].size,
        "parameters": [
            {name: _describe(its) for name, its in parameters_of(model).items()}
            for model, _ in parts
        ],
    }


def _describe(parameter: Parameter) -> list[Any]:
    """Shape, type, cut, and how what is in it was read: the order of codes, fused parts."""
    of, columns = parameter, parameter.columns
    if columns == parameter.shape[-1]:
        columns = None  # nothing is padded
    made = repr((of.parts, of.rows, columns, of.stored, of.constant))
    return [
        list(parameter.shape),
        np.dtype(parameter.dtype).name,
        str(partition_spec(parameter.axes)),
        hashlib.sha256(made.encode()).hexdigest()[:16],
    ]


def _check(directory: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    where = directory / _FACTS
    if found.get("version") != wanted["version"]:
        raise CheckpointError(
            f"{where} has version {found.get('version')}, and this is {wanted['version']}; "
            "run `jaxllm convert` again"
        )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if found.get(name) != wanted[name]:
            raise ValidationError(
                f"{name}={wanted[name]}: {directory} was converted with {found.get(name)}; give "
                "that, or convert again",
                parameter=name,
                value=wanted[name],
            )
    stages = found.get("parameters")
    if not isinstance(stages, list) or len(stages) != len(wanted["parameters"]):
        raise CheckpointError(f"{where} does not list the parameters of each stage")
    for its, ours in zip(stages, wanted["parameters"], strict=True):
        for name in sorted({*its, *ours}):
            if its.get(name) != ours.get(name):
                raise CheckpointError(
                    f"{directory} was converted with other options or by another version: "
                    f"{name} is {its.get(name, 'not there')}, and this engine wants "
                    f"{ours.get(name, 'none')}; give the same dtype and quantization, or convert "
                    "again"
                )


def _checkpointer() -> Any:
    if find_spec("orbax") is None:
        raise ValidationError(
            "load_format='orbax' and `jaxllm convert` need orbax: pip install 'jaxllm[train]'"
        )
    # It logs each step at the level of warnings.
    logging.getLogger("absl").setLevel(logging.ERROR)
    import orbax.checkpoint as ocp

    return ocp.StandardCheckpointer()
