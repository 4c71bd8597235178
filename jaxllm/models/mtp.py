"""Describes heads that checkpoints have beside a decoder, for the prediction of more tokens."""

import dataclasses
from collections.abc import Mapping

from jaxllm.errors import UnsupportedModelError, shown
from jaxllm.layers.attention import AttentionSpec
from jaxllm.layers.moe import MoESpec
from jaxllm.models.checkpoint_map import CheckpointMap
from jaxllm.models.draft_head import HeadSpec, MTPHead
from jaxllm.models.specs import Architecture, LayerSpec


def head_at(
    at: str,
    architecture: Architecture,
    names: CheckpointMap,
    layer: LayerSpec,
    *,
    renamed: Mapping[str, str],
    passes_normed: bool = False,
    left_out: tuple[str, ...] = (),
    copies: Mapping[str, str] | None = None,
) -> HeadSpec:
    """A head whose tensors in the model's checkpoint all begin with a name.

    Args:
      names: the places of the decoder's parameters, in each layout of its layers.
      layer: what the head's layer computes.
      renamed: where the modules of the head are.
      left_out: patterns of tensors that are at the name, and not the head's.
      copies: as those of the map.
    """
    assert architecture.final_norm is not None  # of the families with such heads
    has_experts = any(isinstance(ffn, MoESpec) for ffn in layer.ffns)
    first, *others = [
        dataclasses.replace(
            its.with_names(**renamed),
            # Everything else is the decoder's.
            ignored=(rf"(?!{at.replace('.', '[.]')}[.]).*", *left_out),
            copies=copies or {},
            # Its experts may be in another layout than the decoder's.
            told_by=("layer.mlp.experts.w2_weight",) if has_experts else (),
            others=(),
        )
        for its in (names, *names.others)
    ]
    return HeadSpec(
        kind=MTPHead,
        hidden_size=architecture.hidden_size,
        vocab_size=architecture.vocab_size,
        layer=layer,
        norm=architecture.final_norm,
        passes_normed=passes_normed,
        names=dataclasses.replace(first, others=tuple(others)),
    )


def behind_decoder(
    architecture: Architecture,
    names: CheckpointMap,
    *,
    layer: LayerSpec,
    at: str,
    norm: str,
    passes_normed: bool = False,
    renamed: Mapping[str, str] | None = None,
) -> HeadSpec:
    """A head that is one layer more.

    Args:
      names: the places of the decoder's parameters.
      layer: what it computes.
      at: where its tensors are in the checkpoint, and `norm`, inside, that of its last norm.
      renamed: other names of its modules.
    """
    own = {name: f"{at}.{name}" for name in ("enorm", "hnorm", "eh_proj")}
    head = "lm_head" if not architecture.tie_word_embeddings else "model.embed_tokens"
    return head_at(
        at,
        architecture,
        names,
        layer,
        renamed={"layer": at, "norm": f"{at}.{norm}", **own, **(renamed or {})},
        passes_normed=passes_normed,
        # The parts that it shares with the model are written again beside it.
        copies={
            f"{at}.embed_tokens.weight": "model.embed_tokens.weight",
            f"{at}.shared_head.head.weight": f"{head}.weight",
        },
    )


def next_layer(architecture: Architecture, names: CheckpointMap) -> HeadSpec:
    """The head of DeepSeek V3 and of those that follow it: one layer more, like the last one."""
    number = architecture.hf_config.get("num_nextn_predict_layers") or 0
    if number < 1:
        raise UnsupportedModelError(
            f"config.json: num_nextn_predict_layers={shown(number)}: the model has no layer behind "
            "its decoder that drafts"
        )
    at = f"model.layers.{architecture.num_layers}"
    return behind_decoder(
        architecture, names, layer=architecture.layers[-1], at=at, norm="shared_head.norm"
    )


def beside_decoder(
    architecture: Architecture, names: CheckpointMap, *, counted_by: str
) -> HeadSpec:
    """The head of Qwen3-Next and Qwen3.5, outside of the decoder: a layer with attention. Of
    several such layers the first drafts.

    Args:
      names: the places of a decoder's parameters, in each layout of its layers.
      counted_by: the field of the config that counts the layers. Some configs leave it out.
    """
    number = architecture.hf_config.get(counted_by)
    if number is not None and number < 1:
        raise UnsupportedModelError(
            f"config.json: {counted_by}={shown(number)}: the model has no layer that drafts"
        )
    dedicated = architecture.hf_config.get("mtp_use_dedicated_embeddings")
    if dedicated:
        raise UnsupportedModelError(
            f"config.json: mtp_use_dedicated_embeddings={shown(dedicated)} is not supported in "
            "layers that draft; they read the embeddings of the model"
        )
    first = architecture.layers[0]
    return head_at(
        "mtp",
        architecture,
        names,
        # As a decoder's first layer with attention, and with experts where its first layer has.
        dataclasses.replace(layer_with(architecture, AttentionSpec), ffns=first.ffns),
        renamed={
            "enorm": "mtp.pre_fc_norm_embedding",
            "hnorm": "mtp.pre_fc_norm_hidden",
            "eh_proj": "mtp.fc",
            "layer": "mtp.layers.0",
            "norm": "mtp.norm",
        },
        passes_normed=True,
        left_out=(r"mtp[.]layers[.](?!0[.]).*",),
    )


def layer_with(architecture: Architecture, kind: type[AttentionSpec | MoESpec]) -> LayerSpec:
    """The decoder's first layer with a part of a kind, which a head has as well."""
    for layer in architecture.layers:
        if any(isinstance(part, kind) for part in (*layer.mixers, *layer.ffns)):
            return layer
    name = "attention" if kind is AttentionSpec else "experts"
    raise UnsupportedModelError(
        f"layers that draft have the decoder's {name}, and there are none in it"
    )
