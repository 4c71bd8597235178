"""What codes of 4 bits would bring an engine that reads weights of 16 or 32 bits."""

from dataclasses import replace

from jaxllm_kernels.dense.api import XLA

from jaxllm.errors import UnsupportedModelError
from jaxllm.models.registry import ModelRegistry
from jaxllm.plan.abstract import abstract_model
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.quantization.read import read_scheme
from jaxllm.weights.loader import weights_bytes


def bytes_as_int4(plan: EnginePlan) -> int | None:
    """About the bytes of the weights with `quantization="int4"`, on the device with the most:
    kernels may hold scales in more bits. None: the weights are codes already, or nothing reads
    codes of 4 bits as they are, as our own kernels for CPUs do."""
    architecture = plan.architecture
    has_own_class = ModelRegistry.has_own_class(architecture.name)
    if plan.matmul is XLA or architecture.scheme is not None or has_own_class:
        return None
    coded = replace(architecture, scheme=read_scheme(None, "int4"))
    try:
        return max(
            weights_bytes(
                abstract_model(plan.model_class, coded, plan.dtype, stage.mesh, stage.part),
                stage.mesh,
            )
            for stage in plan.stages
        )
    except UnsupportedModelError:  # no groups fit some matrix
        return None
