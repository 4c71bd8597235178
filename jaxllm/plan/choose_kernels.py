"""Chooses the kernels for a chip, once per engine. A fallback is always logged."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flax import nnx
from jaxllm_kernels.add_norm.api import AddNorm
from jaxllm_kernels.add_norm.gpu import GpuAddNorm
from jaxllm_kernels.compat import why_no_mosaic_gpu
from jaxllm_kernels.dense.api import XLA, Matmul
from jaxllm_kernels.dense.native import NativeCodedMatmul, NativeMatmul
from jaxllm_kernels.dense.tpu import TpuCodedMatmul
from jaxllm_kernels.dense.xla import XlaCodedMatmul
from jaxllm_kernels.experts.api import ExpertsOp
from jaxllm_kernels.experts.gpu import MosaicExperts
from jaxllm_kernels.experts.native import NativeExperts
from jaxllm_kernels.experts.tpu import TpuExperts
from jaxllm_kernels.experts.xla import XLA_EXPERTS, XlaExperts
from jaxllm_kernels.head_products.api import HeadProducts
from jaxllm_kernels.head_products.native import NativeHeadProducts
from jaxllm_kernels.head_products.xla import XLA_HEADS
from jaxllm_kernels.low_rank.api import LowRankOp
from jaxllm_kernels.low_rank.native import NativeLowRank
from jaxllm_kernels.low_rank.xla import XlaLowRank
from jaxllm_kernels.mla.api import (
    LatentConfig,
    default_latent_backends,
    get_latent_backend,
)
from jaxllm_kernels.mla.native import NativeLatentBackend
from jaxllm_kernels.native import library as native
from jaxllm_kernels.native.library import Library, NoLibrary
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_paged_attention.api import (
    BatchLimits,
    SeesAhead,
    default_backends,
    get_backend,
)
from jaxllm_kernels.ragged_paged_attention.native import NativeBackend
from jaxllm_kernels.row_sums.api import RowSums
from jaxllm_kernels.row_sums.native import NativeRowSums
from jaxllm_kernels.sampler.native import NativeSampler

from jaxllm.config import DEFAULT_COMPILATION_CACHE_DIR, EngineConfig
from jaxllm.errors import UnsupportedModelError, ValidationError, refused
from jaxllm.layers.context import MixerBackend, MixerConfig
from jaxllm.layers.moe import MoESpec
from jaxllm.layers.router import Router
from jaxllm.logging import init_logger
from jaxllm.models.pooling_head import PoolingHead
from jaxllm.models.specs import Architecture
from jaxllm.quantization.products import Products
from jaxllm.sampling.layout import HOPPER, LAYOUTS, Layout, with_op, with_row_sums

logger = init_logger(__name__)

# Up to this many tokens, operations between products cost little.
_FREE_PADDING = 128


def load_native_kernels(
    config: EngineConfig,
    chip: Chip,
    dtype: Any,
    kv_dtype: str | None,
    num_shards: int,
    *,
    samples: bool,
) -> Library | NoLibrary:
    """Load the native kernels for CPUs, if they can be built."""
    if chip.platform != "cpu":
        return NoLibrary(f"they are for CPUs, and this is {chip.name}")
    if not config.compilation.native_kernels:
        return NoLibrary("native_kernels is off")
    directory = config.compilation.compilation_cache_dir or DEFAULT_COMPILATION_CACHE_DIR
    kv_dtypes = () if kv_dtype is None else (kv_dtype,)
    library = native.load(
        Path(directory).expanduser() / "native",
        (dtype.name,),
        kv_dtypes,
        with_sampler=_samples_natively(config, num_shards, samples=samples),
    )
    if isinstance(library, NoLibrary):
        logger.info("XLA's slower kernels run in place of our own: %s", library.reason)
    return library


def choose_matmul(
    library: Library | NoLibrary, models: Iterable[Any], num_shards: int, *, is_invariant: bool
) -> Matmul:
    """The native product, if available. XLA cannot shard it over devices. `models` are the abstract
    models of all stages."""
    if isinstance(library, NoLibrary) or num_shards > 1:
        return XLA
    if not is_invariant:
        return NativeMatmul(library)
    try:
        return NativeMatmul.load(library, with_float32=any(map(_multiplies_float32, models)))
    except ValueError as error:
        raise refused("batch_invariant", True, f"products need our own kernel: {error}") from error


def _multiplies_float32(model: Any) -> bool:
    """Whether there are products of float32, whatever the model's type is."""
    for _, module in nnx.iter_graph(model):
        if isinstance(module, PoolingHead) and module.spec.multiplies:
            return True
        if isinstance(module, Router) and module.spec.in_float32:
            return True
    return False


def choose_head_products(
    library: Library | NoLibrary, configs: Collection[MixerConfig], num_shards: int
) -> HeadProducts:
    """What multiplies by the matrices of heads, if latents are attended to. XLA cannot shard the
    native product."""
    have_none = not any(isinstance(config, LatentConfig) for config in configs)
    if isinstance(library, NoLibrary) or num_shards > 1 or have_none:
        return XLA_HEADS
    try:
        return NativeHeadProducts.load(library)
    except ValueError as error:
        logger.info("XLA multiplies by matrices of heads in place of our own kernel: %s", error)
        return XLA_HEADS


def choose_row_sums(library: Library | NoLibrary, *, is_invariant: bool) -> RowSums | None:
    """What adds up rows; None: XLA."""
    if not is_invariant or isinstance(library, NoLibrary):
        return None
    try:
        return NativeRowSums.load(library)
    except ValueError as error:
        raise refused("batch_invariant", True, f"sums need our own kernel: {error}") from error


def choose_low_rank(
    config: EngineConfig, library: Library | NoLibrary, num_shards: int
) -> LowRankOp:
    """What multiplies by adapters. XLA cannot shard the native product."""
    if isinstance(library, NoLibrary) or num_shards > 1 or not config.lora.enable_lora:
        return XlaLowRank()
    try:
        return NativeLowRank.load(library)
    except ValueError as error:
        logger.info("XLA multiplies by adapters in place of our own kernel: %s", error)
        return XlaLowRank()


def with_products(
    architecture: Architecture,
    chip: Chip,
    library: Library | NoLibrary,
    num_shards: int,
    num_tokens: int,
    dtype: Any,
) -> Architecture:
    """The architecture with what may multiply by its codes, if it has any."""
    if (scheme := architecture.scheme) is None:
        return architecture
    of_step = (num_shards, num_tokens, dtype)
    products = choose_products(
        chip, library, architecture, *of_step, keeps_groups=scheme.keeps_groups
    )
    return architecture.with_products(products)


def choose_products(
    chip: Chip,
    library: Library | NoLibrary,
    architecture: Architecture,
    num_shards: int,
    num_tokens: int,
    dtype: Any,
    *,
    keeps_groups: bool,
) -> Products:
    """What may multiply by codes, in steps of up to so many tokens. Experts are computed by one
    device each."""
    widens_in_place = chip.platform != "cpu"
    mx_by_output = widens_in_place and not keeps_groups
    by_xla = XlaCodedMatmul(num_shards, widens_in_place, mx_by_output=mx_by_output)
    experts_by_xla = XlaExperts(coded=replace(by_xla, num_shards=1))
    if chip.platform == "tpu":
        linear = (TpuCodedMatmul(chip=chip.name), by_xla)
        tpu = None
        if _expert_specs(architecture):
            tpu = _experts_on_tpu(chip, architecture, num_shards, num_tokens, dtype, are_codes=True)
        if not isinstance(tpu, TpuExperts):
            return Products(linear=linear, experts=(experts_by_xla,))
        tpu = replace(tpu, mx_by_output=mx_by_output)
        return Products(linear=linear, experts=(tpu, experts_by_xla))
    if isinstance(library, NoLibrary):
        return Products(linear=(by_xla,), experts=(experts_by_xla,))
    # XLA cannot shard the native product.
    linear = (by_xla,) if num_shards > 1 else (NativeCodedMatmul(library), by_xla)
    return Products(linear=linear, experts=(NativeExperts(library), experts_by_xla))


def choose_experts(
    chip: Chip,
    library: Library | NoLibrary,
    architecture: Architecture,
    num_shards: int,
    num_tokens: int,
    dtype: Any,
) -> ExpertsOp | None:
    """The implementation of the experts, for steps of up to so many tokens; None if the model has
    none."""
    specs = _expert_specs(architecture)
    if not specs:
        return None
    if chip.platform == "tpu":
        return _experts_on_tpu(chip, architecture, num_shards, num_tokens, dtype)
    if chip.platform == "gpu":
        return _experts_on_gpu(chip, specs, architecture.hidden_size, num_shards, dtype)
    if isinstance(library, NoLibrary):  # the reason is logged already
        return XLA_EXPERTS
    native = NativeExperts(library)
    try:
        for spec in specs:
            shards = 1 if spec.has_whole_experts else num_shards
            size = spec.input_size(architecture.hidden_size)
            native.check(spec.intermediate_size // shards, size, dtype)
        library.add_experts()
    except ValueError as error:
        logger.warning("experts: XLA's loop, not 'native', since %s", error)
        return XLA_EXPERTS
    return native


def _expert_specs(architecture: Architecture) -> set[MoESpec]:
    return {ffn for layer in architecture.layers for ffn in layer.ffns if isinstance(ffn, MoESpec)}


def _experts_on_tpu(
    chip: Chip,
    architecture: Architecture,
    num_shards: int,
    num_tokens: int,
    dtype: Any,
    *,
    are_codes: bool = False,
) -> TpuExperts | XlaExperts:
    tpu = TpuExperts(chip=chip.name)
    try:
        for spec in _expert_specs(architecture):
            whole = spec.has_whole_experts
            tpu.check(
                num_experts=spec.num_experts // (num_shards if whole else 1),
                num_choices=spec.num_choices,
                num_tokens=num_tokens,
                num_halves=spec.activation.num_halves,
                size=spec.intermediate_size // (1 if whole else num_shards),
                hidden_size=spec.input_size(architecture.hidden_size),
                dtype=dtype,
                are_codes=are_codes,
            )
    except ValueError as error:
        logger.warning("experts: XLA's loop, not 'tpu', since %s", error)
        return XLA_EXPERTS
    return tpu


def _experts_on_gpu(
    chip: Chip, specs: Collection[MoESpec], hidden_size: int, num_shards: int, dtype: Any
) -> ExpertsOp:
    """The kernels for Hopper, if they compute all of these experts."""
    are_whole = all(spec.has_whole_experts for spec in specs)
    kernels = MosaicExperts(num_devices=num_shards if are_whole else 1)
    try:
        for spec in specs:
            shards = 1 if spec.has_whole_experts else num_shards
            size = spec.input_size(hidden_size)
            kernels.check(spec.intermediate_size // shards, size, dtype, chip)
    except ValueError as error:
        logger.warning("experts: XLA's loop, not %r, since %s", kernels.name, error)
        return XLA_EXPERTS
    return kernels.tuned_for(chip)


def choose_sampling(
    config: EngineConfig,
    chip: Chip,
    library: Library | NoLibrary,
    num_shards: int,
    row_sums: RowSums | None,
    *,
    samples: bool,
) -> Layout:
    """How the sampler reads logits. XLA can run each layout everywhere, except that for Hopper."""
    layout = HOPPER if _has_own_kernels(chip, num_shards) else LAYOUTS[chip.platform]
    if row_sums is not None:
        layout = with_row_sums(layout, row_sums)
    if isinstance(library, NoLibrary) or not _samples_natively(config, num_shards, samples=samples):
        return layout
    try:
        return with_op(layout, NativeSampler.load(library))
    except ValueError as error:
        logger.info("XLA samples in place of our own kernel: %s", error)
        return layout


def _samples_natively(config: EngineConfig, num_shards: int, *, samples: bool) -> bool:
    """Whether the native sampler may be used. It takes whole rows, and no processors of users. An
    engine that pools samples nothing."""
    return samples and num_shards == 1 and not config.model.logits_processors


def choose_add_norm(chip: Chip, num_shards: int) -> AddNorm | None:
    """What adds to the residual stream and normalises; None: XLA."""
    return GpuAddNorm() if _has_own_kernels(chip, num_shards) else None


def _has_own_kernels(chip: Chip, num_shards: int) -> bool:
    """Whether kernels for Hopper can compute whole rows."""
    return chip.is_hopper and num_shards == 1 and not why_no_mosaic_gpu()


def free_padding(attention: MixerBackend, matmul: Matmul, dtype: Any) -> int:
    """The number of tokens of a step up to which padding is nearly free."""
    if not (
        isinstance(attention, NativeBackend | NativeLatentBackend)
        and isinstance(matmul, NativeMatmul)
    ):
        return 0
    return min(matmul.max_rows(dtype), _FREE_PADDING)


def choose_attention(
    asked: str,
    chip: Chip,
    library: Library | NoLibrary,
    configs: Collection[MixerConfig],
    limits: BatchLimits,
    dtype: Any,
    *,
    sees_ahead: bool = False,
) -> MixerBackend:
    """The requested backend, or the first of the chip's that supports all of these attentions, and
    tokens that see later ones if there are such. The refusals of the others are logged."""
    get, defaults = _backends(configs, chip)
    names = (asked,) if asked != "auto" else defaults
    if asked == "auto" and isinstance(library, NoLibrary):
        names = tuple(name for name in names if name != "native")  # the reason is logged already
    for name in names:
        try:
            backend: Any = get(name)
            if isinstance(backend, NativeBackend | NativeLatentBackend):
                backend = replace(backend, library=library)  # keeps a user's subclass
            for config in set(configs):
                backend.check(config, limits, dtype=dtype, chip=chip)
            can_see_ahead = isinstance(backend, SeesAhead)
            if sees_ahead and not can_see_ahead:
                raise ValueError(
                    "its tokens see no later ones (it is not SeesAhead), as those of the model's "
                    "images do; start with language_model_only=True for prompts of text"
                )
            return backend.tuned_for(chip)
        except ValueError as error:
            if name == names[-1]:
                raise ValidationError(
                    f"attention_backend={name!r}: {error}",
                    parameter="attention_backend",
                    value=name,
                ) from error
            logger.warning("attention: not %r, since %s", name, error)
    raise AssertionError("no backend to choose from")


def _backends(
    configs: Collection[MixerConfig], chip: Chip
) -> tuple[Callable[[str], Any], tuple[str, ...]]:
    """Backends by name for attentions of this kind, and the names of the chip's defaults."""
    keep_latents = {isinstance(config, LatentConfig) for config in configs}
    if keep_latents == {True, False}:
        raise UnsupportedModelError(
            "some layers keep latents, and others keys and values, which is not supported"
        )
    if True not in keep_latents:
        return get_backend, default_backends(chip)
    defaults = default_latent_backends(chip)
    if chip.platform != "cpu" and defaults == ("xla",):
        logger.warning("latent attention: XLA's loops, since there is no kernel for %s", chip.name)
    return get_latent_backend, defaults
