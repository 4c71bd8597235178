"""A decoder whose tokens also see those behind them: an encoder of the same layers.

Embedders are made of decoders so, such as EmbeddingGemma and GTE of Qwen2.
"""

import dataclasses

from jaxllm.errors import UnsupportedModelError
from jaxllm.layers.attention import AttentionSpec
from jaxllm.layers.self_attention import SelfAttentionSpec
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture, MixerSpec

_CAUSAL, _BOTH_SIDES = "is_causal", "use_bidirectional_attention"
# What an encoder's attention has of a decoder's.
_KEPT = ("num_heads", "num_kv_heads", "head_size", "scale", "rope", "qkv_bias", "o_bias")
_CONVERTED = ("window", "qk_norm")


def without_both_sides(config: HFConfig) -> tuple[HFConfig, bool]:
    """The config as that of a decoder, and whether it says that tokens see both sides."""
    sees_all = config.get(_BOTH_SIDES) is True or config.get(_CAUSAL) is False
    # Gemma's windows are halved; those of others reach as far to each side.
    if config.get(_CAUSAL) is False and config.get("sliding_window") is not None:
        if config.get("use_sliding_window", True) is not False:
            raise UnsupportedModelError(
                f"{_CAUSAL}=False with sliding_window={config.get('sliding_window')} is not "
                "supported; without a window it is"
            )
    of_decoders = {_BOTH_SIDES: None, _CAUSAL: True}
    fields = {name: value for name, value in of_decoders.items() if name in config.fields}
    return (config.replaced(fields) if sees_all else config), sees_all


def seeing_all(architecture: Architecture) -> Architecture:
    """The architecture with attention to both sides. Half of a window is on each."""
    layers = tuple(
        dataclasses.replace(layer, mixers=tuple(_to_both_sides(one) for one in layer.mixers))
        for layer in architecture.layers
    )
    return dataclasses.replace(architecture, layers=layers)


def _to_both_sides(mixer: MixerSpec) -> SelfAttentionSpec:
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
    return SelfAttentionSpec(
        **{name: getattr(plain, name) for name in _KEPT},
        qk_norm=None if norm is None else norm.norm,
        reach=None if plain.window is None else plain.window // 2,
    )
