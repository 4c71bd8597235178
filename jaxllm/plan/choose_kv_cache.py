"""Chooses how keys and values are cached: in the model's type, or as codes of 8 bits."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from jaxllm.cache_config import CacheConfig
from jaxllm.errors import CheckpointError, refused
from jaxllm.layers.attention import AttentionSpec
from jaxllm.logging import init_logger
from jaxllm.models.registry import ModelRegistry
from jaxllm.models.specs import Architecture, LayerSpec, MixerSpec
from jaxllm.quantization.kv_cache import (
    CachedCodes,
    Declared,
    KVCodes,
    StoredScales,
    find_scales,
    read_declared,
)
from jaxllm.weights.checkpoint import open_checkpoint

logger = init_logger(__name__)

_CODES: dict[str, KVCodes] = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "int8": "int8",
}
_WINDOWED = "sliding_window"  # vLLM's word for layers with one
_OPTION = "kv_cache_dtype"
_SKIP = "kv_cache_dtype_skip_layers"


@dataclass(frozen=True, kw_only=True)
class KVCachePlan:
    """A cache of codes."""

    codes: KVCodes
    scales: Literal["of the checkpoint", "calculated at the start", "of 1.0"]
    skipped: tuple[int, ...] = ()  # layers that keep the model's type

    @property
    def is_calculated(self) -> bool:
        return self.scales == "calculated at the start"

    def __str__(self) -> str:
        skipped = ", ".join(map(str, self.skipped))
        rest = f", layers {skipped} not" if self.skipped else ""
        return f"{self.codes} with scales {self.scales}{rest}"


def with_kv_cache(
    architecture: Architecture,
    asked: CacheConfig,
    model_dir: Path,
    *,
    hf_config: Mapping[str, Any],
    dtype: Any,
    reads_weights: bool,
) -> tuple[Architecture, KVCachePlan | None]:
    """The architecture with the cache that is asked for, or that its config.json declares.

    `reads_weights` is whether there is a checkpoint of weights, which may have scales.
    """
    quantization = hf_config.get("quantization_config") or hf_config.get("compression_config")
    wants_codes = asked.kv_cache_dtype not in ("bfloat16", "float16")
    declared = read_declared(quantization) if wants_codes else None
    codes = _choose_codes(architecture, asked, declared, dtype)
    if codes is None:
        for option in ("calculate_kv_scales", _SKIP):
            if value := getattr(asked, option):
                raise refused(option, value, f"the cache has no codes; give {_OPTION}='fp8', too")
        return architecture, None
    stored = _find_scales(model_dir) if reads_weights else None
    # What is not declared is what vLLM once had: fp8.
    if codes != ("float8_e4m3fn" if declared is None else declared.codes):
        stored = None
    how: Literal["of the checkpoint", "calculated at the start", "of 1.0"] = "of 1.0"
    if asked.calculate_kv_scales:
        how = "calculated at the start"
    elif stored is not None:
        how = "of the checkpoint"
    elif declared is not None and declared.codes == codes and reads_weights:
        raise CheckpointError(
            f"quantization_config.{declared.field} declares scales for cached keys and values, and "
            f"the checkpoint has none; give {_OPTION}='bfloat16' (the model's type), or calculate "
            "them (calculate_kv_scales)"
        )
    elif codes == "int8":
        how = "calculated at the start"  # a scale of 1.0 would leave nothing of most keys
    else:
        logger.warning(
            "the checkpoint has no scales for keys and values of 8 bits: they are 1.0, and what is "
            "above 448 is cut; calculate_kv_scales calculates better ones at the start"
        )
    cached = CachedCodes(codes=codes, stored=stored if how == "of the checkpoint" else None)
    skipped = _skipped(architecture, asked.kv_cache_dtype_skip_layers)
    layers = tuple(
        layer if _owner(index, layer) in skipped else _with_codes(layer, cached)
        for index, layer in enumerate(architecture.layers)
    )
    plan = KVCachePlan(codes=codes, scales=how, skipped=tuple(sorted(skipped)))
    return dataclasses.replace(architecture, layers=layers), plan


def _choose_codes(
    architecture: Architecture, asked: CacheConfig, declared: Declared | None, dtype: Any
) -> KVCodes | None:
    """The type of the codes; None: keys and values keep the model's type."""
    name = asked.kv_cache_dtype
    if name == "auto" and declared is None:
        return None
    if name in ("bfloat16", "float16"):
        own = jnp.dtype(dtype).name
        if name != own:
            raise refused(
                _OPTION, name, f"the model computes in {own}; a cache has this type, or 8 bits"
            )
        return None
    why = _why_not(architecture)
    if name == "auto":
        assert declared is not None
        if why is not None:
            logger.warning("the cache keeps the model's type: %s", why)
        return None if why is not None else declared.codes
    if why is not None:
        raise refused(_OPTION, name, why)
    return _CODES[name]


def _why_not(architecture: Architecture) -> str | None:
    """Why a model cannot cache codes; None: it can."""
    if ModelRegistry.has_own_class(architecture.name):
        return f"{architecture.name} runs by a class of its own, which is not supported with codes"
    mixers = (mixer for layer in architecture.layers for mixer in layer.mixers)
    if not all(isinstance(mixer, AttentionSpec) for mixer in mixers):
        return f"{architecture.name} keeps latents, which have codes in no kernel here"
    return None


def _find_scales(model_dir: Path) -> StoredScales | None:
    with open_checkpoint(model_dir) as checkpoint:
        return find_scales({name: its.shape for name, its in checkpoint.tensors.items()})


def _owner(index: int, layer: LayerSpec) -> int:
    """The layer whose cache a layer uses."""
    return index if layer.caches_of is None else layer.caches_of


def _with_codes(layer: LayerSpec, cached: CachedCodes) -> LayerSpec:
    def changed(mixer: MixerSpec) -> MixerSpec:
        assert isinstance(mixer, AttentionSpec), mixer
        return dataclasses.replace(mixer, cached=cached)

    return dataclasses.replace(layer, mixers=tuple(map(changed, layer.mixers)))


def _skipped(architecture: Architecture, names: tuple[str, ...]) -> set[int]:
    """The layers that are named."""
    skipped = set[int]()
    for name in names:
        if name == _WINDOWED:
            found = {i for i, layer in enumerate(architecture.layers) if _has_window(layer)}
        elif name.isdecimal() and int(name) < architecture.num_layers:
            found = {int(name)}
        else:
            found = set()
        if not found:
            raise refused(
                _SKIP,
                name,
                f"no layer is meant; give numbers from 0 to {architecture.num_layers - 1}, or "
                f"{_WINDOWED!r} if layers have a window",
            )
        skipped |= found
    return skipped


def _has_window(layer: LayerSpec) -> bool:
    return any(isinstance(its, AttentionSpec) and its.window is not None for its in layer.mixers)


def of_draft(asked: CacheConfig, kv_cache: KVCachePlan) -> CacheConfig:
    """What is asked for of a second model's cache, beside that of the first: the same codes. The
    numbers of layers are those of the first model."""
    name: Literal["fp8", "int8"] = "int8" if kv_cache.codes == "int8" else "fp8"
    return CacheConfig(kv_cache_dtype=name, calculate_kv_scales=asked.calculate_kv_scales)
