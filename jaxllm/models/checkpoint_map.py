"""Where the parameters of a model are in its checkpoint: sources, and the map that names them.

A source is an expression over the tensors of a checkpoint. It describes a whole parameter, before
the parameter is sharded. Its shape is known before any data is read, because it states the shapes
that its tensors must have. Any box of a source can be read without the rest.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from jaxllm.errors import UnsupportedModelError

Shape = tuple[int, ...]
# A box of an array: one slice for each axis, with a start and an end.
Box = tuple[slice, ...]


# What a tensor has: floats of 16 or 32 bits; codes of 8; scales, which may be small floats, too;
# scales that are powers of two, as their exponents; words and bytes of several codes; numbers of
# tokens; or blocks of codes and scales, of which a file knows what they are.
Kind = Literal[
    "float", "int8", "float8_e4m3fn", "scale", "power", "int32", "uint8", "int64", "blocks"
]  # fmt: skip


class Tensors(Protocol):
    """An open checkpoint, which holds the data."""

    def copy(self, name: str, box: Box, target: np.ndarray, kind: Kind = "float") -> None:
        """Fill the target with a box of a tensor of a kind; convert to the target's type."""
        ...


class Source(Protocol):
    """An array made of tensors of a checkpoint."""

    @property
    def shape(self) -> Shape: ...

    def rows(self) -> Iterator["Rows"]:
        """All rows of tensors that the array is made of."""
        ...

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        """Fill the target with a box of the array."""
        ...


@dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint, and the shape and type that it must have."""

    name: str
    shape: Shape
    kind: Kind = "float"

    def rows(self) -> Iterator["Rows"]:
        yield Rows(self, 0, self.shape[0] if self.shape else 1)

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        tensors.copy(self.name, box, target, self.kind)


@dataclass(frozen=True)
class Rows:
    """Rows `first` up to `end` of a tensor."""

    tensor: Tensor
    first: int
    end: int

    @property
    def shape(self) -> Shape:
        return (self.end - self.first, *self.tensor.shape[1:])

    def rows(self) -> Iterator["Rows"]:
        yield self

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        rows = slice(box[0].start + self.first, box[0].stop + self.first)
        self.tensor.copy(tensors, (rows, *box[1:]), target)


@dataclass(frozen=True)
class Concat:
    """Sources one after the other along the first axis."""

    sources: tuple[Source, ...]

    @property
    def shape(self) -> Shape:
        return (sum(source.shape[0] for source in self.sources), *self.sources[0].shape[1:])

    def rows(self) -> Iterator[Rows]:
        for source in self.sources:
            yield from source.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        start = 0
        for source in self.sources:
            end = start + source.shape[0]
            first, last = max(box[0].start, start), min(box[0].stop, end)
            if first < last:
                part = target[first - box[0].start : last - box[0].start]
                source.copy(tensors, (slice(first - start, last - start), *box[1:]), part)
            start = end


@dataclass(frozen=True)
class Stack:
    """Sources of one shape along a new first axis: the experts of a layer."""

    sources: tuple[Source, ...]

    @property
    def shape(self) -> Shape:
        return (len(self.sources), *self.sources[0].shape)

    def rows(self) -> Iterator[Rows]:
        return Concat(self.sources).rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        for place, index in enumerate(range(box[0].start, box[0].stop)):
            self.sources[index].copy(tensors, box[1:], target[place])


@dataclass(frozen=True)
class Transposed:
    """A source with its last two axes exchanged: weights stored [in, out]."""

    source: Source

    @property
    def shape(self) -> Shape:
        *others, rows, columns = self.source.shape
        return (*others, columns, rows)

    def rows(self) -> Iterator[Rows]:
        return self.source.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        *others, rows, columns = box
        self.source.copy(tensors, (*others, columns, rows), target.swapaxes(-1, -2))


@dataclass(frozen=True)
class InHalves:
    """Rows of heads. `rotated` of them, from `first` on, are pairs to rotate, one member beside the
    other.

    The array has the first members of a head's pairs and then the second ones, as `rotate` wants
    them. With queries and keys in the same order, their products are the same.
    """

    source: Source
    head_size: int
    rotated: int
    first: int = 0

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def rows(self) -> Iterator[Rows]:
        return self.source.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        # The whole heads that contain the rows of the box.
        size = self.head_size
        first, end = box[0].start // size * size, -(-box[0].stop // size) * size
        held = np.empty((end - first, *target.shape[1:]), target.dtype)
        self.source.copy(tensors, (slice(first, end), *box[1:]), held)
        in_head, pairs = np.arange(size), slice(self.first, self.first + self.rotated)
        in_head[pairs] = np.concatenate([in_head[pairs][::2], in_head[pairs][1::2]])
        rows = np.arange(box[0].start, box[0].stop)
        target[...] = held[rows // size * size + in_head[rows % size] - first]


@dataclass(frozen=True)
class ViewedAs:
    """A source in another shape, with its elements in the same order."""

    source: Source
    shape: Shape

    def rows(self) -> Iterator[Rows]:
        return self.source.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        # Whole rows of the source that contain the rows of the box.
        row, source_row = (math.prod(shape[1:]) for shape in (self.shape, self.source.shape))
        first, end = box[0].start * row, box[0].stop * row
        rows = slice(first // source_row, -(-end // source_row))
        whole = (rows, *(slice(0, size) for size in self.source.shape[1:]))
        held = np.empty((rows.stop - rows.start, *self.source.shape[1:]), target.dtype)
        self.source.copy(tensors, whole, held)
        offset = rows.start * source_row
        flat = held.reshape(-1)[first - offset : end - offset]
        target[...] = flat.reshape(-1, *self.shape[1:])[(slice(None), *box[1:])]


class Stored(Protocol):
    """Where the pieces of a parameter are, if they are not tensors of its shape and name."""

    @property
    def largest(self) -> float:
        """The bound of made-up values."""
        ...

    @property
    def floats(self) -> str | None:
        """The leaf of the parameter of floats that this one is made of while it is read, by
        `of_floats(source)`; None: the checkpoint has it."""
        ...

    def __call__(self, module: str, shape: Shape) -> Source:
        """The source of a piece [out, ...], from the full name of its module."""
        ...


class Place(NamedTuple):
    """The parameter `{parent}.{module}.{leaf}`, fused of pieces of these shapes."""

    parent: str
    module: str
    leaf: str
    pieces: tuple[Shape, ...]
    stored: Stored | None = None

    def tensor(self, module: str, shape: Shape) -> Source:
        """The leaf of the same name in a sibling module."""
        return self.tensor_of(self._name(module), self.leaf, shape)

    def tensor_of(self, module: str, leaf: str, shape: Shape) -> Source:
        """The leaf of any module, from its full name."""
        if self.stored is None:
            return Tensor(f"{module}.{leaf}", shape)
        return self.stored(module, shape)

    def plain_tensor(self, module: str, shape: Shape) -> Tensor:
        """Likewise, for rules that need a tensor as it is."""
        name = self._name(module, self.leaf)
        if self.stored is not None:
            raise UnsupportedModelError(f"{name}: this family is not supported with quantisation")
        return Tensor(name, shape)

    def _name(self, *names: str) -> str:
        return ".".join(filter(None, (self.parent, *names)))


Rule = Callable[[Place], Source]


def as_named(place: Place) -> Source:
    """The tensor with the parameter's name."""
    rows = sum(piece[0] for piece in place.pieces)
    return place.tensor(place.module, (rows, *place.pieces[0][1:]))


def concatenated(*modules: str) -> Rule:
    """A rule that concatenates one tensor for each piece, from the modules of these names.

    A parameter may lack the last pieces, as that of a layer with keys of another layer does.
    """

    def rule(place: Place) -> Source:
        assert len(modules) >= len(place.pieces), f"{place} does not say what it is fused of"
        return Concat(tuple(map(place.tensor, modules, place.pieces)))

    return rule


def rotated_in_pairs(head_size: int, rotated: int) -> Rule:
    """A rule that concatenates queries, keys and values, where neighbours are rotated together."""

    def rule(place: Place) -> Source:
        query, key, value = map(place.tensor, ("q_proj", "k_proj", "v_proj"), place.pieces)
        queries, keys = (InHalves(tensor, head_size, rotated) for tensor in (query, key))
        return Concat((queries, keys, value))

    return rule


@dataclass(frozen=True, kw_only=True)
class CheckpointMap:
    """An exact map from parameters to the tensors of a checkpoint.

    Our modules have the names of most checkpoints. So a parameter is the tensor of the same name,
    unless there is a rule for its module. A rule names modules as the checkpoint does.
    """

    rules: Mapping[str, Rule] = field(default_factory=dict)
    # Modules on the way to a parameter, or its own module if that has no rule: our name -> the
    # checkpoint's, which may be several names with dots between, or empty.
    renamed: Mapping[str, str] = field(default_factory=dict)
    # Regular expressions that match the whole names of unused tensors.
    ignored: tuple[str, ...] = ()
    # Parameters that may repeat another one. A model without the parameter requires that the
    # tensors of both are equal, if the checkpoint has it; a model with it loads it.
    copies: Mapping[str, str] = field(default_factory=dict)
    # The maps of other layouts in which checkpoints of the same models are written, and parameters
    # by whose tensors layouts are told apart. Every decoder has an embedding, and only one.
    others: tuple["CheckpointMap", ...] = ()
    told_by: tuple[str, ...] = ("model.embed_tokens.weight",)
    told_shapes: Mapping[str, Shape] = field(default_factory=dict)  # of tensors of some of them
    folders: tuple[str, ...] = ()  # inside the model's, with tensors `{folder}.{name}`
    # The maps of parts of the model whose modules have names of their own, by our name of the part.
    parts: Mapping[str, "CheckpointMap"] = field(default_factory=dict)

    def source(
        self, parameter: str, pieces: tuple[Shape, ...], stored: Stored | None = None
    ) -> Source:
        """The source of a parameter that consists of one or more pieces of these shapes."""
        part, _, inside = parameter.partition(".")
        if part in self.parts:
            return self.parts[part].source(inside, pieces, stored)
        *path, module, leaf = parameter.split(".")
        if stored is not None and stored.floats is not None:
            made: Any = stored
            leaf = stored.floats
            pieces = tuple((*piece[:-1], made.num_inputs) for piece in pieces)
            return made.of_floats(self.source(".".join((*path, module, leaf)), pieces))
        rule = self.rules.get(module)
        if rule is None:
            rule, module = as_named, self.renamed.get(module, module)
        parent = ".".join(filter(None, (self.renamed.get(name, name) for name in path)))
        return rule(Place(parent, module, leaf, pieces, stored))

    def modules(self, parameter: str, pieces: tuple[Shape, ...]) -> list[tuple[str, ...]]:
        """The modules that a weight is fused of: of each its names in every layout. A layout that
        has them in one tensor names it for each, as some have all experts of a layer."""
        layouts = [
            list(
                dict.fromkeys(
                    rows.tensor.name.removesuffix(".weight")
                    for rows in names.source(parameter, pieces).rows()
                )
            )
            for names in (self, *self.others)
        ]
        count = max(map(len, layouts))
        layouts = [names * count if len(names) == 1 else names for names in layouts]
        return list(zip(*layouts, strict=True))

    @property
    def copied_tensors(self) -> dict[str, str]:
        """`copies` by the names of tensors."""
        return {self._tensor(copy): self._tensor(copied) for copy, copied in self.copies.items()}

    def for_tensors(self, shapes: Mapping[str, Shape | None]) -> "CheckpointMap":
        """The map of the layout that a checkpoint with these tensors has."""
        # The modules of weights, which may be stored as codes.
        weights = {f"{name.rpartition('.')[0]}.weight" for name in shapes} | shapes.keys()
        for its in (self, *self.others):
            told = {its._tensor(parameter): shape for parameter, shape in its.told_shapes.items()}
            if all(its._tensor(parameter) in weights for parameter in its.told_by):
                if all(shapes.get(tensor) == shape for tensor, shape in told.items()):
                    return its
        return self

    def _tensor(self, parameter: str) -> str:
        # Of one expert, if its weights are stacked.
        (rows,) = self.source(parameter, ((1, 1, 1),)).rows()
        return rows.tensor.name

    def is_ignored(self, tensor: str) -> bool:
        return any(re.fullmatch(pattern, tensor) for pattern in self.ignored)

    def ignoring(self, *patterns: str) -> "CheckpointMap":
        """A copy of the map that leaves out more tensors, in every layout."""
        others = tuple(its.ignoring(*patterns) for its in self.others)
        return dataclasses.replace(self, ignored=(*self.ignored, *patterns), others=others)

    def with_rules(self, **rules: Rule) -> "CheckpointMap":
        """A copy of the map with rules added or replaced."""
        return dataclasses.replace(self, rules={**self.rules, **rules})

    def with_names(self, **renamed: str) -> "CheckpointMap":
        """A copy of the map with names of modules added or replaced."""
        return dataclasses.replace(self, renamed={**self.renamed, **renamed})


# Llama's names, which most decoders use.
LLAMA_NAMES = CheckpointMap(
    rules={
        "qkv_proj": concatenated("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": concatenated("gate_proj", "up_proj"),
    },
    # transformers before 4.32 wrote these; we compute them from the config.
    ignored=(r".*\.rotary_emb\.inv_freq",),
    # Some checkpoints with tied embeddings contain the head, too.
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)
