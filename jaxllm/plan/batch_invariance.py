"""What an engine refuses that promises the same bits alone and in a crowd.

`README.md` of this room says what is promised and how it is kept.
"""

from typing import NoReturn

from flax import nnx
from jaxllm_kernels.dense.native import NativeCodedMatmul, NativeMatmul
from jaxllm_kernels.experts.native import NativeExperts
from jaxllm_kernels.mla.api import LatentConfig
from jaxllm_kernels.ragged_paged_attention.native import NativeBackend

from jaxllm.config import EngineConfig
from jaxllm.errors import refused
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.quantization.linear import CodedExperts, CodedHead, CodedLinear


def check_options(config: EngineConfig) -> None:
    """Refuse options with which no model keeps the promise."""
    if not config.model.batch_invariant:
        return
    if config.parallel.tensor_parallel_size > 1:
        _refuse("sums over devices do not keep it; set tensor_parallel_size=1")
    if config.lora.enable_lora:
        _refuse("adapters do not keep it; leave enable_lora out")
    if config.model.logits_processors:
        _refuse("whether your logits_processors keep it is not known; leave them out")


def check_invariance(plan: EnginePlan) -> None:
    """Refuse plans whose results may depend on the batch. What is not known to keep the promise
    does not pass."""
    if (why := _why_not(plan)) is not None:
        _refuse(why)


def _refuse(why: str) -> NoReturn:
    raise refused("batch_invariant", True, why)


def _why_not(plan: EnginePlan) -> str | None:
    if plan.chip.platform != "cpu":
        return f"CPUs alone keep it; on {plan.chip.name} the batch decides how sums are cut"
    if plan.pooling is not None:
        return "models that pool do not keep it; leave it out"
    if plan.state_ops is not None:
        return "recurrent layers do not keep it; leave it out"
    if plan.images is not None:
        return "models with images do not keep it; leave it out"
    if not isinstance(plan.matmul, NativeMatmul) or plan.row_sums is None:
        return "it needs our own kernels for CPUs, and products are XLA's"
    if any(isinstance(config, LatentConfig) for config in plan.attention_configs):
        return "latent attention is XLA's, which does not keep it"
    if type(plan.attention) is not NativeBackend:
        return f"attention {plan.attention.name!r} does not keep it, and 'native' does"
    if plan.experts is not None and not isinstance(plan.experts, NativeExperts):
        return "experts of this kind are computed by XLA, which does not keep it"
    models = [plan.abstract_model(stage) for stage in plan.stages]
    if plan.draft is not None:
        models.append(plan.abstract_draft())
    return next(filter(None, map(_codes, models)), None)


def _codes(model: nnx.Module) -> str | None:
    for _, module in nnx.iter_graph(model):
        its = (
            module.op if isinstance(module, CodedExperts)
            else module.matmul if isinstance(module, CodedLinear)
            else module.by_codes if isinstance(module, CodedHead)
            else None
        )  # fmt: skip
        if its is not None and not isinstance(its, NativeCodedMatmul | NativeExperts):
            return "products with these codes are XLA's, which do not keep it"
    return None
