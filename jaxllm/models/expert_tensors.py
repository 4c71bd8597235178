"""Where the experts' weights are in a checkpoint: rules for `CheckpointMap`, in which the module
`experts` has the parameters w13_weight [E, 2, F, D], w2_weight [E, D, F] and their biases. Of
experts without gates w13_weight is [E, 1, F, D]."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxllm.layers.moe import MoESpec
from jaxllm.models.checkpoint_map import (
    Box,
    CheckpointMap,
    Place,
    Rows,
    Rule,
    Shape,
    Source,
    Stack,
    Tensor,
    Tensors,
    Transposed,
    ViewedAs,
    as_named,
)
from jaxllm.models.specs import Architecture


@dataclass(frozen=True)
class GateAndUp:
    """A source [E, 2F, ...] as [E, 2, F, ...]: the gates of each expert, then its ups."""

    source: Source
    # Whether gates and ups alternate; otherwise all gates come first.
    alternates: bool = False

    @property
    def shape(self) -> Shape:
        experts, rows, *others = self.source.shape
        return (experts, 2, rows // 2, *others)

    def rows(self) -> Iterator[Rows]:
        return self.source.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        experts, halves, rows, *others = box
        size = self.source.shape[1] // 2
        # One expert at a time, so that no copy of all of them is in memory.
        for place, expert in enumerate(range(experts.start, experts.stop)):
            one = slice(expert, expert + 1)
            if self.alternates:
                span = slice(2 * rows.start, 2 * rows.stop)
                held = np.empty((1, span.stop - span.start, *target.shape[3:]), target.dtype)
                self.source.copy(tensors, (one, span, *others), held)
                for index, half in enumerate(range(halves.start, halves.stop)):
                    target[place, index] = held[0, half::2]
                continue
            for index, half in enumerate(range(halves.start, halves.stop)):
                part = slice(half * size + rows.start, half * size + rows.stop)
                into = target[place : place + 1, index]
                self.source.copy(tensors, (one, part, *others), into)


def each_expert(
    gate: str | None = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    *,
    module: str = "experts",
) -> Rule:
    """A rule for checkpoints with tensors of their own for each expert, with these names. Without
    `gate` experts have no gates."""
    halves = tuple(filter(None, (gate, up)))

    def rule(place: Place) -> Source:
        (shape,) = place.pieces
        leaf = place.leaf.removeprefix("w13_").removeprefix("w2_")

        def of_expert(number: int, name: str, shape: Shape) -> Source:
            return place.tensor_of(f"{place.parent}.{module}.{number}.{name}", leaf, shape)

        if place.leaf.startswith("w2_"):
            return Stack(tuple(of_expert(e, down, shape[1:]) for e in range(shape[0])))
        return Stack(
            tuple(
                Stack(tuple(of_expert(e, name, shape[2:]) for name in halves))
                for e in range(shape[0])
            )
        )

    return rule


def stacked_experts(
    gate_up: str, down: str, *, is_transposed: bool = False, alternates: bool = False
) -> Rule:
    """A rule for checkpoints with two tensors for all experts of a layer: [E, 2F, D] and [E, D, F].

    `gate_up` and `down` are names of tensors behind that of the layer's module. Those of biases,
    [E, 2F] and [E, D], end in `_bias`. With `is_transposed` the weights are [E, D, 2F] and
    [E, F, D], unless they are codes.
    """

    def rule(place: Place) -> Source:
        (shape,) = place.pieces
        is_down, is_bias = place.leaf.startswith("w2_"), place.leaf.endswith("_bias")
        name = f"{place.parent}.{down if is_down else gate_up}{'_bias' if is_bias else ''}"
        if not is_down:
            shape = (shape[0], shape[1] * shape[2], *shape[3:])
        if place.stored is not None:
            source: Source = place.stored(name, shape)
        elif is_transposed and not is_bias:
            source = Transposed(Tensor(name, (shape[0], shape[2], shape[1])))
        else:
            source = Tensor(name, shape)
        return source if is_down else GateAndUp(source, alternates)

    return rule


def stacked_or_each(
    names: CheckpointMap, architecture: Architecture, stacked: Rule, *, each_first: bool = False
) -> CheckpointMap:
    """The map for checkpoints that have all experts of a layer in two tensors, as releases in 16
    bits, or each in tensors of its own, as those with codes. The first layout is that of weights
    that are made up."""
    if not architecture.num_experts:
        return names
    layer = min(architecture.num_experts)
    (name,) = {ffn.name for ffn in architecture.layers[layer].ffns if isinstance(ffn, MoESpec)}
    told = f"model.layers.{layer}.{name}.experts.w2_weight"
    names = dataclasses.replace(names, told_by=(*names.told_by, told))
    first, other = (names.with_rules(experts=rule) for rule in (stacked, each_expert()))
    if each_first or (architecture.scheme is not None and architecture.scheme.reads_codes):
        first, other = other, first
    return dataclasses.replace(first, others=(other,))


def router_with_bias_at(name: str, *, is_row: bool = False) -> Rule:
    """A rule for routers whose bias for the choice is a tensor of this name in the layer's module,
    perhaps with one row: [1, E]."""

    def rule(place: Place) -> Source:
        if place.leaf != "e_score_correction_bias":
            return as_named(place)
        (shape,) = place.pieces
        if not is_row:
            return Tensor(f"{place.parent}.{name}", shape)
        return ViewedAs(Tensor(f"{place.parent}.{name}", (1, *shape)), shape)

    return rule
