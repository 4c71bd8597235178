"""Describes heads that checkpoints have beside a decoder, for the prediction of more tokens."""

import dataclasses
from collections.abc import Mapping

from jaxllm.errors import UnsupportedModelError, shown
from jaxllm.models.checkpoint_map import CheckpointMap
from jaxllm.models.draft_head import HeadSpec, MTPHead
from jaxllm.models.specs import Architecture, LayerSpec


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
    """A head of the checkpoint that has the model.

    Args:
      names: the places of the decoder's parameters.
      layer: what its layer computes.
      at: where its tensors are in the checkpoint, and `norm`, inside, that of its last norm.
      renamed: other names of its modules.
    """
    assert architecture.final_norm is not None  # of the families with such heads
    own = {name: f"{at}.{name}" for name in ("enorm", "hnorm", "eh_proj")}
    names = names.with_names(layer=at, norm=f"{at}.{norm}", **own, **(renamed or {}))
    head = "lm_head" if not architecture.tie_word_embeddings else "model.embed_tokens"
    return HeadSpec(
        kind=MTPHead,
        hidden_size=architecture.hidden_size,
        vocab_size=architecture.vocab_size,
        layer=layer,
        norm=architecture.final_norm,
        passes_normed=passes_normed,
        names=dataclasses.replace(
            names,
            # Everything else is the decoder's.
            ignored=(rf"(?!{at.replace('.', '[.]')}[.]).*",),
            # The parts that it shares with the model are written again beside it.
            copies={
                f"{at}.embed_tokens.weight": "model.embed_tokens.weight",
                f"{at}.shared_head.head.weight": f"{head}.weight",
            },
            others=(),
        ),
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
