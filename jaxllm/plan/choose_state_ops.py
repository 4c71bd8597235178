"""Chooses the kernels of mixers that keep a state, once per engine. A fallback is always logged."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from jaxllm_kernels.causal_conv.api import ConvOp
from jaxllm_kernels.causal_conv.native import NativeConv
from jaxllm_kernels.causal_conv.tpu import TpuConv
from jaxllm_kernels.causal_conv.xla import XlaConv
from jaxllm_kernels.gated_delta.gpu import MosaicDelta
from jaxllm_kernels.gated_delta.native import NativeDelta
from jaxllm_kernels.gated_delta.tpu import TpuDelta
from jaxllm_kernels.gated_delta.xla import XlaDelta
from jaxllm_kernels.native.library import Library, NoLibrary
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_self_attention.gpu import MosaicSelfAttention
from jaxllm_kernels.ragged_self_attention.native import NativeSelfAttention
from jaxllm_kernels.ragged_self_attention.tpu import TpuSelfAttention
from jaxllm_kernels.ragged_self_attention.xla import XlaSelfAttention
from jaxllm_kernels.recurrent.copies import TpuCopies, XlaCopies
from jaxllm_kernels.recurrent.tpu_blocks import check_slots
from jaxllm_kernels.row_sums.api import RowSums
from jaxllm_kernels.ssd.gpu import MosaicSsd
from jaxllm_kernels.ssd.native import NativeSsd
from jaxllm_kernels.ssd.tpu import TpuSsd
from jaxllm_kernels.ssd.xla import XlaSsd

from jaxllm.layers.gated_delta import GatedDeltaSpec
from jaxllm.layers.kimi_delta import KimiDeltaSpec
from jaxllm.layers.mamba import MambaSpec
from jaxllm.layers.self_attention import SelfAttentionSpec
from jaxllm.layers.short_conv import ShortConvSpec
from jaxllm.layers.state import StateConfig, StateOps
from jaxllm.logging import init_logger
from jaxllm.models.specs import Architecture

logger = init_logger(__name__)

# Mixers with the gated delta rule, and all that begin with a short convolution.
_DELTA = {GatedDeltaSpec, KimiDeltaSpec}
_WITH_CONVOLUTIONS = _DELTA | {MambaSpec, ShortConvSpec}


def choose_state_ops(
    chip: Chip,
    library: Library | NoLibrary,
    architecture: Architecture,
    parts: Iterable[Any],
    dtype: Any,
    row_sums: RowSums | None,
    num_shards: int,
    encoder_tokens: int | None,
) -> StateOps | None:
    """The implementations of the ops of mixers without pages; None if the model has none of these.
    `parts` are the abstract models of all stages, `encoder_tokens` the largest step of an encoder,
    and None of another model. Convolutions on GPUs are XLA's, which copies no states there."""
    configs = [config for part in parts for config in part.state_configs]
    if not configs:
        return None
    mixers = {mixer for layer in architecture.layers for mixer in layer.mixers}
    if encoder_tokens is not None:
        ops = encoder_ops(chip, library, dtype, num_shards, mixers, encoder_tokens)
        return replace(ops, row_sums=row_sums)
    ops = replace(_ops_by_xla(chip), row_sums=row_sums)
    kinds = {type(mixer) for mixer in mixers}
    load: dict[str, Callable[[], Any]] = {}
    if chip.platform == "tpu":
        if not kinds.isdisjoint(_WITH_CONVOLUTIONS):
            load["conv"] = functools.partial(_conv_on_tpu, chip, configs, num_shards)
        if not kinds.isdisjoint(_DELTA):
            load["delta"] = functools.partial(_delta_on_tpu, chip, mixers, num_shards)
        if MambaSpec in kinds:
            load["ssd"] = functools.partial(_ssd_on_tpu, chip, mixers, num_shards)
        # Last, since the convolution says how many inputs there are to copy.
        load["copies"] = lambda: _copies_on_tpu(chip, configs, num_shards, ops.conv)
    elif chip.platform == "gpu":
        if not kinds.isdisjoint(_DELTA):
            load["delta"] = functools.partial(_delta_on_gpu, chip, mixers)
        if MambaSpec in kinds:
            load["ssd"] = functools.partial(_ssd_on_gpu, chip, mixers)
    elif not isinstance(library, NoLibrary):  # otherwise the reason is logged already
        if not kinds.isdisjoint(_WITH_CONVOLUTIONS):
            load["conv"] = functools.partial(NativeConv.load, library, dtype)
        if not kinds.isdisjoint(_DELTA):
            load["delta"] = functools.partial(NativeDelta.load, library)
        if MambaSpec in kinds:
            load["ssd"] = functools.partial(NativeSsd.load, library)
    for name, its in load.items():
        try:
            ops = replace(ops, **{name: its()})
        except ValueError as error:
            logger.warning("%s of recurrent layers: XLA's loops, since %s", name, error)
    return ops


def _conv_on_tpu(chip: Chip, configs: Iterable[StateConfig], num_shards: int) -> TpuConv:
    """The kernels; raises ValueError unless they copy a device's channels of all states."""
    conv = TpuConv(chip=chip.name)
    for array in (array for config in configs for array in config.arrays):
        if array.width is not None:
            conv.check(array.shape[1] // num_shards)
    return conv


def _copies_on_tpu(
    chip: Chip, configs: Iterable[StateConfig], num_shards: int, conv: ConvOp
) -> TpuCopies:
    """The kernel; raises ValueError unless it copies a device's part of all states."""
    for array in (array for config in configs for array in config.arrays):
        *_, rows, columns = array.shape
        if array.width is None:
            check_slots(rows, columns)
        else:
            check_slots(conv.num_inputs(array.width), columns // num_shards)
    return TpuCopies(chip=chip.name)


def _delta_on_tpu(chip: Chip, mixers: set[Any], num_shards: int) -> TpuDelta:
    """The kernels; raises ValueError unless they compute a device's decodes of all mixers."""
    delta = TpuDelta(chip=chip.name)
    heads: list[tuple[int, int, int, int, bool]] = []
    for mixer in mixers:
        if isinstance(mixer, GatedDeltaSpec):
            counts = mixer.num_key_heads // num_shards, mixer.num_heads // num_shards
            heads.append((*counts, mixer.key_size, mixer.value_size, False))
        elif isinstance(mixer, KimiDeltaSpec):
            count = mixer.num_heads // num_shards
            heads.append((count, count, mixer.head_size, mixer.head_size, True))
    for *sizes, _ in heads:
        delta.check(*sizes)

    def check_all() -> None:
        for *sizes, by_channel in heads:
            delta.check_tiles(*sizes, by_channel=by_channel)

    return replace(delta, with_tiles=_computes_tiles(check_all))


def _computes_tiles(check: Callable[[], None]) -> bool:
    """Whether kernels compute tiles too; logs why they do not."""
    try:
        check()
    except ValueError as error:
        logger.warning("prompts of recurrent layers: XLA's loops, since %s", error)
        return False
    return True


def _delta_on_gpu(chip: Chip, mixers: set[Any]) -> MosaicDelta:
    """The kernels; raises ValueError unless they compute the heads of all mixers, of which a device
    may have any number."""
    delta = MosaicDelta.tuned_for(chip)
    for mixer in mixers:
        if isinstance(mixer, GatedDeltaSpec):
            delta.check(mixer.key_size, mixer.value_size)
        elif isinstance(mixer, KimiDeltaSpec):
            delta.check(mixer.head_size, mixer.head_size)
    return delta


def _ssd_on_gpu(chip: Chip, mixers: set[Any]) -> MosaicSsd:
    """The kernels; raises ValueError unless they compute the heads of all mixers, of which a device
    may have any number."""
    ssd = MosaicSsd.tuned_for(chip)
    for mixer in mixers:
        if isinstance(mixer, MambaSpec):
            ssd.check(mixer.head_size, mixer.state_size)
    return ssd


def _ssd_on_tpu(chip: Chip, mixers: set[Any], num_shards: int) -> TpuSsd:
    """The kernels; raises ValueError unless they compute the decodes of all mixers."""
    ssd = TpuSsd(chip=chip.name)
    specs = [mixer for mixer in mixers if isinstance(mixer, MambaSpec)]
    for spec in specs:
        ssd.check(spec.head_size, spec.state_size)

    def check_all() -> None:
        for spec in specs:
            # Groups are repeated if there are fewer of them than shards.
            num_groups = max(1, spec.num_groups // num_shards)
            num_heads = spec.num_heads // num_shards
            ssd.check_tiles(num_groups, num_heads, spec.head_size, spec.state_size)

    return replace(ssd, with_tiles=_computes_tiles(check_all))


def encoder_ops(
    chip: Chip,
    library: Library | NoLibrary,
    dtype: Any,
    num_shards: int,
    mixers: Iterable[Any],
    max_num_tokens: int,
    *,
    is_cut: bool = True,
) -> StateOps:
    """The implementations for layers that keep nothing: those of encoders and of towers, for steps
    of up to so many tokens. `is_cut` says whether heads are cut over the shards; otherwise each
    device has all of them."""
    ops = _ops_by_xla(chip)
    load: Callable[[], Any]
    if chip.platform == "gpu":
        load = functools.partial(_self_attention_on_gpu, chip, dtype, mixers)
    elif chip.platform == "tpu":
        load = functools.partial(
            _self_attention_on_tpu, chip, dtype, num_shards, mixers, max_num_tokens
        )
    elif not isinstance(library, NoLibrary):
        load = functools.partial(NativeSelfAttention.load, library)
    else:
        return ops
    try:
        if chip.platform != "cpu" and num_shards > 1 and not is_cut:
            raise ValueError(
                "XLA does not repeat the kernel on devices that heads are not cut over"
            )
        return replace(ops, self_attention=load())
    except ValueError as error:
        logger.warning("self-attention: XLA's loops, since %s", error)
        return ops


def _self_attention_on_gpu(
    chip: Chip, dtype: Any, mixers: Iterable[SelfAttentionSpec]
) -> MosaicSelfAttention:
    """The kernel; raises ValueError unless it computes the heads of all mixers."""
    attention = MosaicSelfAttention.tuned_for(chip)
    for mixer in mixers:
        attention.check(head_size=mixer.head_size, dtype=dtype)
    return attention


def _self_attention_on_tpu(
    chip: Chip,
    dtype: Any,
    num_shards: int,
    mixers: Iterable[SelfAttentionSpec],
    max_num_tokens: int,
) -> TpuSelfAttention:
    """The kernel; raises ValueError unless it computes a device's heads of all mixers."""
    attention = TpuSelfAttention(chip=chip.name)
    for mixer in mixers:
        attention.check(
            num_tokens=max_num_tokens,
            num_heads=mixer.num_heads // num_shards,
            num_kv_heads=mixer.num_kv_heads // num_shards,
            head_size=mixer.head_size,
            dtype=dtype,
        )
    return attention


def _ops_by_xla(chip: Chip) -> StateOps:
    """The implementations that every chip has, with their tunables for this one."""
    return StateOps(
        conv=XlaConv(),
        delta=XlaDelta().tuned_for(chip),
        ssd=XlaSsd().tuned_for(chip),
        copies=XlaCopies(),
        self_attention=XlaSelfAttention().tuned_for(chip),
    )
