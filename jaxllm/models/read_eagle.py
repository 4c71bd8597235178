"""Reads what an EAGLE head computes, of its config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.models.checkpoint_map import LLAMA_NAMES, CheckpointMap, Place, Source, Tensor
from jaxllm.models.draft_head import Eagle3Head, EagleHead, HalfNormedBlock, HeadSpec
from jaxllm.models.families import llama
from jaxllm.models.harmless import HARMLESS
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture

_HARMLESS_OF_EAGLE = {
    "eagle_config": "names the layers that are tapped, and is read for them",
    "speculators_model_type": "the method says which head it is",
    "parallel_drafting": "must be false, see below",
}
# Of the model, and copied into some checkpoints of heads; and the inverse of d2t.
_OF_MODEL = (r"(model\.)?embed_tokens\.weight", r"t2d", r".*\.rotary_emb\.inv_freq")


def read_eagle(
    method: Literal["eagle", "eagle3"],
    fields: Mapping[str, Any],
    target: Architecture,
    *,
    max_model_len: int,
) -> HeadSpec:
    """Read the config.json of a head of one of Llama's layers, for a model."""
    config = HFConfig(fields, max_model_len=max_model_len)
    config.refuse_unsupported()
    config.must_be("model_type", "llama")
    if config.quantization:
        raise UnsupportedModelError("a head whose weights are codes is not supported")
    decoder = llama.read("LlamaForCausalLM", config)
    for name, size in (
        ("num_hidden_layers", 1),
        ("hidden_size", target.hidden_size),
        ("vocab_size", target.vocab_size),
        ("target_hidden_size", target.hidden_size),
    ):
        config.must_be(name, size)
    config.must_be("add_para_norm", False)
    config.must_be("parallel_drafting", False)
    (layer,) = decoder.layers
    of_all: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "norm": decoder.final_norm,
        "has_bias": config.flag("bias"),
    }
    if method == "eagle":
        # Its output head is the model's, as are its embeddings.
        names = _names(_OF_MODEL + (r"lm_head\.weight",))
        layer = dataclasses.replace(layer, block=HalfNormedBlock)
        spec = HeadSpec(kind=EagleHead, layer=layer, names=names, **of_all)
    else:
        taps = _read_taps(config, target.num_layers)
        num_drafted = config.integer("draft_vocab_size", target.vocab_size)
        if num_drafted > target.vocab_size:
            raise CheckpointError(
                f"config.json: draft_vocab_size={num_drafted} is above vocab_size"
            )
        maps_tokens = num_drafted < target.vocab_size
        spec = HeadSpec(
            kind=Eagle3Head,
            layer=layer,
            taps=taps,
            adds_to_normed=config.flag("norm_before_residual"),
            num_drafted_tokens=num_drafted,
            maps_tokens=maps_tokens,
            names=_names(_OF_MODEL if maps_tokens else (*_OF_MODEL, "d2t")),
            **of_all,
        )
    config.refuse_unread(HARMLESS.keys() | _HARMLESS_OF_EAGLE)
    return spec


def _read_taps(config: HFConfig, num_layers: int) -> tuple[int, ...]:
    """The layers before which the model's stream is tapped: near its begin, its middle, its end."""
    eagle = config.get("eagle_config") or {}
    if not isinstance(eagle, Mapping):
        raise CheckpointError(f"config.json: eagle_config={shown(eagle)} must be an object")
    if eagle.get("use_aux_hidden_state", True) is not True:
        raise UnsupportedModelError(
            "config.json: eagle_config.use_aux_hidden_state must be true: a head that sees the "
            "last hidden states alone is not supported"
        )
    name = "eagle_aux_hidden_state_layer_ids"
    taps = config.get(name) or eagle.get(name) or [2, num_layers // 2, num_layers - 3]
    if not isinstance(taps, list | tuple) or not all(type(tap) is int for tap in taps) or not taps:
        raise CheckpointError(f"config.json: {name}={shown(taps)} must be a list of numbers")
    if not all(0 <= tap <= num_layers for tap in taps):
        raise CheckpointError(
            f"config.json: {name}={shown(taps)}: the model has {num_layers} layers"
        )
    return tuple(taps)


def _names(ignored: tuple[str, ...]) -> CheckpointMap:
    """The names of released heads, whose layer is `midlayer` or `layers.0`."""
    first, second = (
        dataclasses.replace(
            LLAMA_NAMES,
            renamed={"layer": layer},
            rules={**LLAMA_NAMES.rules, "token_map": _offsets},
            ignored=ignored,
            copies={},
            landmark="layer.self_attn.o_proj.weight",
        )
        for layer in ("midlayer", "layers.0")
    )
    return dataclasses.replace(first, others=(second,))


def _offsets(place: Place) -> Source:
    (shape,) = place.pieces
    return Tensor("d2t", shape, "int64")
