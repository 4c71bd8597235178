"""Counts a model's weights on one device: what steps read of them, and what they multiply by."""

from collections import Counter
from dataclasses import dataclass

from flax import nnx
from jax.sharding import Mesh

from jaxllm.layers.moe import Experts
from jaxllm.models.base import Model
from jaxllm.parallel.sharding import num_pieces
from jaxllm.quantization.form import HeldCodes, HeldOffsets, HeldScales
from jaxllm.weights.loader import Parameter, parameters_of, weights_bytes


@dataclass(frozen=True, kw_only=True)
class WeightCounts:
    """What one device holds."""

    num_bytes: int
    # A code counts as the weight for which it stands; scales and offsets are no weights.
    num_weights: float
    # The bytes of all experts, by the share of them that a token chooses.
    expert_bytes: tuple[tuple[float, int], ...]


def count_weights(abstract_model: Model, mesh: Mesh) -> WeightCounts:
    parameters = parameters_of(abstract_model).values()
    of_experts = Counter[float]()
    for _, module in nnx.iter_graph(abstract_model):
        if isinstance(module, Experts):
            share = module.spec.num_choices / module.spec.num_experts
            of_experts[share] += weights_bytes(module, mesh)
    return WeightCounts(
        num_bytes=weights_bytes(abstract_model, mesh),
        num_weights=sum(_num_weights(p) / num_pieces(mesh, p.axes) for p in parameters),
        expert_bytes=tuple(sorted(of_experts.items())),
    )


def _num_weights(parameter: Parameter) -> float:
    stored = parameter.stored
    if isinstance(stored, HeldScales | HeldOffsets):
        return 0
    if isinstance(stored, HeldCodes):
        return parameter.size * parameter.dtype.itemsize * 8 / stored.held.bits
    return parameter.size
