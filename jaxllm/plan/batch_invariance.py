"""What an engine refuses that promises the same bits alone and in a crowd.

`README.md` of this room says what is promised and how it is kept.
"""

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx
from jaxllm_kernels.causal_conv.native import NativeConv
from jaxllm_kernels.dense.native import NativeCodedMatmul, NativeMatmul
from jaxllm_kernels.experts.native import NativeExperts
from jaxllm_kernels.gated_delta.native import NativeDelta
from jaxllm_kernels.head_products.native import NativeHeadProducts
from jaxllm_kernels.mla.native import NativeLatentBackend
from jaxllm_kernels.ragged_paged_attention.native import NativeBackend
from jaxllm_kernels.ragged_self_attention.native import NativeSelfAttention

from jaxllm.config import EngineConfig
from jaxllm.errors import refused
from jaxllm.layers.gated_delta import GatedDeltaSpec
from jaxllm.layers.kimi_delta import KimiDeltaSpec
from jaxllm.layers.mamba import MambaSpec
from jaxllm.layers.moe import Experts
from jaxllm.layers.self_attention import SelfAttentionSpec
from jaxllm.models.registry import ModelRegistry
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.quantization.linear import CodedExperts, CodedHead, CodedLinear

_SHOWN_CODES = ("int8", "int4", "float8_e4m3fn")


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
    if plan.images is not None:
        return "models with images do not keep it; leave it out"
    if ModelRegistry.has_own_class(plan.architecture.name):
        return f"whether the class of {plan.architecture.name} keeps it is not known"
    if not isinstance(plan.matmul, NativeMatmul) or plan.row_sums is None:
        return "it needs our own kernels for CPUs, and products are XLA's"
    if (why := _states(plan)) is not None:
        return why
    if type(plan.attention) not in (NativeBackend, NativeLatentBackend):
        return f"attention {plan.attention.name!r} does not keep it, and 'native' does"
    has_latents = isinstance(plan.attention, NativeLatentBackend)
    if has_latents and not isinstance(plan.head_products, NativeHeadProducts):
        return "products with matrices of heads keep it with our own kernel, and these are XLA's"
    models = [plan.abstract_model(stage) for stage in plan.stages]
    return next(filter(None, map(_products, models)), None)


def _states(plan: EnginePlan) -> str | None:
    """Why recurrent layers do not keep it."""
    if (ops := plan.state_ops) is None:
        return None
    mixers = {type(mixer) for layer in plan.architecture.layers for mixer in layer.mixers}
    if mixers == {SelfAttentionSpec}:
        if isinstance(ops.self_attention, NativeSelfAttention):
            return None
        return (
            f"self-attention keeps it with our own kernel, and this is {ops.self_attention.name!r}"
        )
    if MambaSpec in mixers:
        return "it was not shown for the state spaces of Mamba"
    if plan.dtype != jnp.float32:
        return "recurrent layers were shown to keep it in float32; set dtype='float32'"
    if plan.speculation is not None:
        return "it was not shown for recurrent layers with drafts; leave them out"
    if not isinstance(ops.conv, NativeConv):
        return f"convolutions keep it with our own kernel, and these are {ops.conv.name!r}"
    has_delta = not mixers.isdisjoint((GatedDeltaSpec, KimiDeltaSpec))
    if has_delta and not isinstance(ops.delta, NativeDelta):
        return f"the delta rule keeps it with our own kernel, and this is {ops.delta.name!r}"
    return None


def _products(model: Any) -> str | None:
    """Why experts or products with codes do not keep it."""
    for _, module in nnx.iter_graph(model):
        if isinstance(module, CodedExperts):
            return "it was not shown for experts with codes"
        if isinstance(module, Experts) and not isinstance(module.op, NativeExperts):
            return f"experts keep it with our own kernel, and these are {module.op.name!r}"
        if isinstance(module, CodedLinear):
            product = module.matmul
        elif isinstance(module, CodedHead):
            product = module.by_codes
        else:
            continue
        if not isinstance(product, NativeCodedMatmul):
            return f"products with {module.form} are {product.name!r}, and 'native' ones keep it"
        if module.form.codes not in _SHOWN_CODES:
            return f"it was not shown for {module.form}, but for {' and '.join(_SHOWN_CODES)}"
    return None
