"""Models as their devices hold them, with shapes in place of weights."""

from typing import Any

from jax.sharding import Mesh
from jaxllm_kernels.platform import TABLE_ROW_MULTIPLES

from jaxllm.layers.embedding import pad_tables
from jaxllm.models.base import Model
from jaxllm.models.part import ModelPart
from jaxllm.models.specs import Architecture
from jaxllm.parallel.sharding import TENSOR


def abstract_model(
    model_class: type[Model],
    architecture: Architecture,
    dtype: Any,
    mesh: Mesh,
    part: ModelPart | None = None,
) -> Model:
    """Make the model, or a part of it, for the devices of a mesh."""
    model = model_class.abstract(architecture, dtype, mesh.shape[TENSOR], part)
    pad_tables(model, TABLE_ROW_MULTIPLES[mesh.devices.flat[0].platform])
    return model
