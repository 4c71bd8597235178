"""Which matrices of a checkpoint in 16 bits become codes, and what the modules that have them are
called in a checkpoint with codes. The model's own map of its checkpoints says both."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from jaxllm.errors import UnsupportedModelError
from jaxllm.layers.linear import Linear
from jaxllm.layers.moe import Experts
from jaxllm.layers.router import Router
from jaxllm.models.architecture import read_architecture
from jaxllm.models.checkpoint_map import (
    Box,
    Concat,
    InHalves,
    Rows,
    Shape,
    Source,
    Stack,
    Tensor,
)
from jaxllm.models.registry import ModelRegistry
from jaxllm.models.spans import Beside
from jaxllm.weights.checkpoint import some_of
from jaxllm.weights.loader import parameters_of, sources_of

WEIGHT = ".weight"
_NEVER = ".shared_expert_gate.weight"  # of one output
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Matrix:
    """A matrix [out, in] of a module, which a box of a source has."""

    module: str
    source: Source
    box: Box

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.box[-2:]
        return rows.stop - rows.start, columns.stop - columns.start


def find_matrices(
    config: dict[str, Any], shapes: Mapping[str, Shape]
) -> tuple[dict[str, tuple[Matrix, ...]], str | None]:
    """Find the weights of linear layers and experts among tensors of these names and shapes: those
    of each tensor, of which there is one, or all experts of a layer; and the tensor of the head,
    which stays as it is."""
    model = _abstract(config)
    kinds = {
        ".".join(map(str, path)): type(module)
        for path, module in nnx.iter_graph(model)
        if isinstance(module, Linear | Experts) and not isinstance(module, Router)
    }
    parameters, names = parameters_of(model), model.checkpoint_map
    sources = sources_of(parameters, names.for_tensors(shapes))
    of_tensors: dict[str, tuple[Matrix, ...]] = {}
    stacked = {}
    for name, source in sources.items():
        kind = kinds.get(name.rpartition(".")[0])
        tensors = list(_tensors(source))
        for tensor in tensors:
            is_weight = tensor.name.endswith(WEIGHT) and not tensor.name.endswith(_NEVER)
            if kind is not None and is_weight and len(tensor.shape) == 2:
                whole = tuple(slice(0, size) for size in tensor.shape)
                matrix = Matrix(tensor.name.removesuffix(WEIGHT), tensor, whole)
                of_tensors[tensor.name] = (matrix,)
        if kind is Experts and not tensors:
            stacked[name] = source
    layouts = (sources_of(parameters, layout) for layout in (names, *names.others))
    for name, places in _one_by_one(sources, stacked, layouts).items():
        (tensor,) = {rows.tensor.name for rows in stacked[name].rows()}
        of_tensors[tensor] = tuple(
            Matrix(module, stacked[name], _box(stacked[name].shape, index))
            for module, index in places
        )
    head = next((tensor.name for tensor in _tensors(sources.get(_HEAD))), None)
    return of_tensors, head


def check_read(config: dict[str, Any], names: Set[str]) -> None:
    """Raise unless tensors of these names would be read as config.json describes them."""
    architecture = read_architecture(config)
    model = ModelRegistry.resolve([architecture.name]).abstract(architecture, np.float32)
    sources = sources_of(
        parameters_of(model), model.checkpoint_map.for_tensors(dict.fromkeys(names))
    )
    missing = {rows.tensor.name for source in sources.values() for rows in source.rows()} - names
    if missing:
        raise UnsupportedModelError(
            f"the checkpoint would lack {some_of(sorted(missing))}: codes are not supported for "
            "weights that are stored like those of this model"
        )


def _abstract(config: dict[str, Any]) -> Any:
    """The model that config.json describes, without weights."""
    architecture = read_architecture(config)
    if ModelRegistry.has_own_class(architecture.name):
        raise UnsupportedModelError(f"{architecture.name} runs by a class of its own")
    return ModelRegistry.resolve([architecture.name]).abstract(architecture, np.float32)


def _one_by_one(
    sources: Mapping[str, Source],
    stacked: Mapping[str, Source],
    layouts: Iterator[Mapping[str, Source]],
) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """The modules of single experts in the layout that differs in nothing else, and their indices
    in the parameters that all experts have."""
    for layout in layouts:
        others = all(layout[name] == source for name, source in sources.items() - stacked.items())
        places = {name: list(_leaves(layout[name], ())) for name in stacked}
        if others and all(places.values()):
            return places
    return {}


def _leaves(source: Source, index: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    match source:
        case Stack(sources=sources):
            for place, part in enumerate(sources):
                yield from _leaves(part, (*index, place))
        case Tensor() if index:
            yield source.name.removesuffix(WEIGHT), index


def _box(shape: Shape, index: tuple[int, ...]) -> Box:
    whole = (slice(0, size) for size in shape[len(index) :])
    return (*(slice(place, place + 1) for place in index), *whole)


def _tensors(source: Source | None) -> Iterator[Tensor]:
    """The tensors whose rows a source has: not transposed, nor seen in another shape."""
    match source:
        case Tensor(shape=(_, _)):
            yield source
        case Rows(tensor=tensor):
            yield tensor
        case InHalves(source=source) | Beside(whole=source):
            yield from _tensors(source)
        case Concat(sources=sources) | Stack(sources=sources):
            for part in sources:
                yield from _tensors(part)
