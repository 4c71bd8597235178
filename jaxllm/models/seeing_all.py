"""A decoder whose tokens also see those behind them: an encoder of the same layers.

Embedders are made of decoders so, such as EmbeddingGemma and GTE of Qwen2.
"""

import dataclasses
from typing import Literal

from jaxllm.errors import UnsupportedModelError
from jaxllm.layers.attention import AttentionSpec
from jaxllm.layers.self_attention import SelfAttentionSpec
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture, MixerSpec

# How far a token sees to each side in a layer with a window.
Reach = Literal["half of a window", "a window"]
_CAUSAL, _BOTH_SIDES = "is_causal", "use_bidirectional_attention"
# What an encoder's attention has of a decoder's.
_KEPT = ("num_heads", "num_kv_heads", "head_size", "scale", "rope", "qkv_bias", "o_bias")
_CONVERTED = ("window", "qk_norm")


def without_both_sides(config: HFConfig) -> tuple[HFConfig, Reach | None]:
    """The config as that of a decoder, and how far tokens see to each side; None: it is one."""
    by_field: dict[str, Reach] = {}
    if config.get(_BOTH_SIDES) is True:
        by_field[_BOTH_SIDES] = "half of a window"
    if config.get(_CAUSAL) is False:
        by_field[_CAUSAL] = "a window"
    if not by_field:
        return config, None
    if len(by_field) > 1:
        raise UnsupportedModelError(
            f"{_CAUSAL}=False and {_BOTH_SIDES}=True read a window differently; give one of them"
        )
    of_decoders = {_BOTH_SIDES: None, _CAUSAL: True}
    fields = {name: value for name, value in of_decoders.items() if name in config.fields}
    return config.replaced(fields), next(iter(by_field.values()))


def seeing_all(architecture: Architecture, reach: Reach) -> Architecture:
    """The architecture with attention to both sides."""
    layers = tuple(
        dataclasses.replace(layer, mixers=tuple(_to_both_sides(one, reach) for one in layer.mixers))
        for layer in architecture.layers
    )
    return dataclasses.replace(architecture, layers=layers)


def _to_both_sides(mixer: MixerSpec, reach: Reach) -> SelfAttentionSpec:
    plain = None
    if isinstance(mixer, AttentionSpec):
        kept = {name: getattr(mixer, name) for name in _KEPT}
        converted = {name: getattr(mixer, name) for name in _CONVERTED}
        plain = AttentionSpec(**kept, **converted)
    norm = None if plain is None else plain.qk_norm
    if plain is None or plain != mixer or (norm and norm != type(norm)(norm=norm.norm)):
        raise UnsupportedModelError(
            f"{_CAUSAL}=False or {_BOTH_SIDES}: this attention is not supported where tokens "
            "see those behind them; heads with norms, rotations and windows are"
        )
    window = plain.window
    if window is not None and reach == "half of a window":
        window //= 2
    return SelfAttentionSpec(
        **{name: getattr(plain, name) for name in _KEPT},
        qk_norm=None if norm is None else norm.norm,
        reach=window,
    )
