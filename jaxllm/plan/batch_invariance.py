"""What an engine refuses that promises the same bits alone and in a crowd.

`README.md` of this room says what is promised and how it is kept.
"""

from typing import Any, NoReturn

import jax
from flax import nnx
from jaxllm_kernels.dense.native import NativeCodedMatmul, NativeMatmul
from jaxllm_kernels.mla.api import LatentConfig
from jaxllm_kernels.ragged_paged_attention.native import NativeBackend

from jaxllm.config import EngineConfig
from jaxllm.errors import refused
from jaxllm.models.registry import ModelRegistry
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.quantization.linear import CodedHead, CodedLinear


def check_options(config: EngineConfig) -> None:
    """Refuse options with which no model keeps the promise."""
    if not config.model.batch_invariant:
        return
    if jax.config.read("jax_disable_most_optimizations"):
        # A model with layer norms was seen to differ.
        _refuse("code that XLA optimises little does not keep it")
    if config.parallel.tensor_parallel_size > 1:
        _refuse("sums over devices do not keep it; set tensor_parallel_size=1")
    if config.parallel.pipeline_parallel_size > 1 or config.parallel.nnodes != 1:
        _refuse("it was shown for one device; leave pipeline_parallel_size and nnodes out")
    speculation = config.speculation.read()
    if speculation is not None and speculation.method != "ngram":
        _refuse(f"it was not shown with drafts by {speculation.method!r}, but with 'ngram'")
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
    if any(isinstance(config, LatentConfig) for config in plan.attention_configs):
        return "latent attention is XLA's, which does not keep it"
    if plan.experts is not None:
        return "experts do not keep it; leave it out"
    if ModelRegistry.has_own_class(plan.architecture.name):
        return f"whether the class of {plan.architecture.name} keeps it is not known"
    if not isinstance(plan.matmul, NativeMatmul) or plan.row_sums is None:
        return "it needs our own kernels for CPUs, and products are XLA's"
    if type(plan.attention) is not NativeBackend:
        return f"attention {plan.attention.name!r} does not keep it, and 'native' does"
    models = [plan.abstract_model(stage) for stage in plan.stages]
    return next(filter(None, map(_codes, models)), None)


def _codes(model: Any) -> str | None:
    for _, module in nnx.iter_graph(model):
        if isinstance(module, CodedLinear):
            its = module.matmul
        elif isinstance(module, CodedHead):
            its = module.by_codes
        else:
            continue
        if not isinstance(its, NativeCodedMatmul) or module.form.codes != "int8":
            return f"products with {module.form} do not keep it; codes of int8 do"
    return None
