"""Gemma 4: Gemma 3 with heads of another size on its full layers, values of norm one, and scalars.

Scores are not scaled, since queries, keys and values are all normalised. Full layers rotate a
quarter of the pairs of a head. Large models have no projection of values there: a value is its key
before norm and rotation. In small models, the last layers have only queries, and attend to the keys
and values of the last earlier layer of their type. Their MLPs may be twice as wide. Every layer
of a small model also gets an input of its own for each token. Some models have experts beside the
MLP of each layer, chosen by the residual stream itself. Each layer ends with a stored scalar.
In large models that also see images, the tokens of an image see each other in the layers with a
window. The tower for sound is not read.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.layers.attention import AttentionSpec, QKNorm
from jaxllm.layers.moe import MoEBesideMLPSpec, MoESpec
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.layers.per_layer_input import PerLayerInputSpec
from jaxllm.layers.router import RouterSpec
from jaxllm.models.around_decoder import beside_embed_vision, inside_larger_model
from jaxllm.models.blocks import ExpertsSandwichBlock, ScaledSandwichBlock
from jaxllm.models.checkpoint_map import (
    LLAMA_NAMES,
    CheckpointMap,
    Place,
    Source,
    Tensor,
)
from jaxllm.models.expert_tensors import stacked_experts, stacked_or_each
from jaxllm.models.families.gemma2 import FULL, SLIDING, read_gemma, read_layer_types
from jaxllm.models.family import Family, read_attention, read_mlp
from jaxllm.models.harmless import AROUND_DECODER
from jaxllm.models.hf_config import HFConfig, check_size
from jaxllm.models.read_moe import read_moe
from jaxllm.models.specs import Architecture, LayerSpec
from jaxllm.models.towers import gemma4 as tower

_IN_LARGER_MODEL = "Gemma4ForConditionalGeneration"
_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
}
# Fields of `per_layer_config` that are read.
_OF_LAYER = {"head_dim", "num_key_value_heads"}
_MAX_TABLE_SIZE = 1 << 36  # elements


def read(name: str, config: HFConfig) -> Architecture:
    if name == _IN_LARGER_MODEL:
        config = config.inside("text_config")
    config = config.with_defaults(_DEFAULTS)
    _refuse_unsupported(config)
    kinds = read_layer_types(config, pattern=6)
    kinds[-1] = FULL  # whatever the config says, as in transformers
    owners = _read_owners(config, kinds)
    moe = _read_moe(config)
    is_wide = config.flag("use_double_wide_mlp")
    mlp = read_mlp(config, activation="hidden_activation")
    wide = dataclasses.replace(mlp, intermediate_size=2 * mlp.intermediate_size)
    layers = [
        LayerSpec(
            mixers=(_read_attention(config, index, kind, owners),),
            ffns=(wide if is_wide and owners[index] is not None else mlp, *moe),
            norm=_read_norm(config),
            block=ExpertsSandwichBlock if moe else ScaledSandwichBlock,
            caches_of=owners[index],
            per_layer_input=_read_per_layer_input(config, mlp.activation),
        )
        for index, kind in enumerate(kinds)
    ]
    _check_heads(layers)
    return read_gemma(name, config, layers)


def _read_owners(config: HFConfig, kinds: list[str]) -> list[int | None]:
    """For each layer, the layer whose keys and values it attends to, in place of its own."""
    num_sharing = config.integer("num_kv_shared_layers", 0, lowest=0)
    first = len(kinds) - num_sharing
    last = {kind: index for index, kind in enumerate(kinds[: max(first, 0)])}
    if missing := set(kinds) - last.keys():
        raise CheckpointError(
            f"config.json: num_kv_shared_layers={num_sharing} of {len(kinds)} layers leave none of "
            f"type {', '.join(sorted(missing))} that has keys and values"
        )
    return [None if index < first else last[kind] for index, kind in enumerate(kinds)]


def _read_attention(
    config: HFConfig, index: int, kind: str, owners: list[int | None]
) -> AttentionSpec:
    norm = _read_norm(config)
    bias = config.flag("attention_bias")
    rope: dict[str, Any] = {}
    if config.get("rope_parameters") is None and kind == FULL:
        rope = {"default_type": "proportional", "default_share": 0.25, "default_theta": 1e6}
    attention = read_attention(
        _of_layer(config, index, kind),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QKNorm(norm=norm),
        layer_type=kind,
        **rope,
    )
    window = config.integer("sliding_window")
    is_borrowed, is_lent = owners[index] is not None, index in owners
    return dataclasses.replace(
        attention,
        scale=1.0,
        window=window if kind == SLIDING else None,
        v_norm=dataclasses.replace(norm, has_weight=False),
        values_are_keys=config.flag("attention_k_eq_v") and kind == FULL,
        kv="borrowed" if is_borrowed else "lent" if is_lent else "own",
    )


def _of_layer(config: HFConfig, index: int, kind: str) -> HFConfig:
    """The config with the sizes of a layer.

    transformers 5.23 writes what differs by the indices of layers, all of the same number of
    digits. Older files have the sizes of full layers; that of kv heads counts only if values are
    keys.
    """
    older = {"head_dim": config.get("global_head_dim")}
    if num_kv_heads := config.get("num_global_key_value_heads"):
        older["num_key_value_heads"] = num_kv_heads if config.flag("attention_k_eq_v") else None
    given = config.get("per_layer_config")
    if given is None:
        fields = older if kind == FULL else {}
    else:
        fields = _at_index(given, index)
    return config.replaced({name: size for name, size in fields.items() if size is not None})


def _at_index(given: Any, index: int) -> Mapping[str, Any]:
    """The fields of a layer in `per_layer_config`."""
    if not isinstance(given, Mapping) or not all(
        str(key).isdecimal() and isinstance(fields, Mapping) for key, fields in given.items()
    ):
        raise CheckpointError(
            f"config.json: per_layer_config={shown(given)} must map indices of layers to objects"
        )
    fields = {int(key): fields for key, fields in given.items()}.get(index, {})
    if unknown := sorted(fields.keys() - _OF_LAYER):
        raise UnsupportedModelError(
            f"per_layer_config with {', '.join(unknown):.80} is not supported; supported are "
            f"{' and '.join(sorted(_OF_LAYER))}"
        )
    return fields


def _read_per_layer_input(config: HFConfig, activation: str) -> PerLayerInputSpec | None:
    size = config.integer("hidden_size_per_layer_input", lowest=0)
    rows, pad = config.integer("vocab_size_per_layer_input"), config.get("pad_token_id")
    if size == 0:
        return None
    vocab_size = config.integer("vocab_size")
    if rows < vocab_size:
        raise CheckpointError(
            f"config.json: vocab_size_per_layer_input={rows} is less than vocab_size={vocab_size}"
        )
    table = rows * size * config.integer("num_hidden_layers")
    check_size("the size of the inputs of all layers for all tokens", table, _MAX_TABLE_SIZE)
    return PerLayerInputSpec(
        size=size,
        vocab_size=rows,
        norm=_read_norm(config),
        activation=activation,
        of_given=pad if isinstance(pad, int) else 0,
    )


def _read_moe(config: HFConfig) -> tuple[MoESpec, ...]:
    """The experts beside each MLP, if there are any."""
    if not config.flag("enable_moe_block"):
        return ()
    router = RouterSpec(
        scores="softmax",
        normalises=True,
        norm=RMSNormSpec(eps=_read_norm(config).eps),
        scales_experts=True,
    )
    return (
        read_moe(
            config,
            router,
            kind=MoEBesideMLPSpec,
            choices="top_k_experts",
            activation="hidden_activation",
        ),
    )


def _read_norm(config: HFConfig) -> RMSNormSpec:
    return RMSNormSpec(eps=config.positive("rms_norm_eps", 1e-6), rounds_first=False)


def _check_heads(layers: list[LayerSpec]) -> None:
    """Refuse a layer whose heads do not fit the keys and values that it attends to."""
    for index, layer in enumerate(layers):
        if layer.caches_of is None:
            continue
        own, other = (
            (attention.num_kv_heads, attention.head_size)
            for its in (layer, layers[layer.caches_of])
            for attention in its.mixers
            if isinstance(attention, AttentionSpec)
        )
        if own != other:
            raise CheckpointError(
                f"config.json: layer {index} attends to the keys and values of layer "
                f"{layer.caches_of}, but has {own[0]} kv heads of {own[1]}, and they {other[0]} of "
                f"{other[1]}"
            )


def _refuse_unsupported(config: HFConfig) -> None:
    # Only the tokens of images see each other with "vision": the tower reads the word.
    direction = config.get("use_bidirectional_attention")
    if direction not in (None, False, "vision"):
        raise UnsupportedModelError(
            f"use_bidirectional_attention={shown(direction)} is not supported: a token sees only "
            "those before it"
        )


def _checkpoint(architecture: Architecture) -> CheckpointMap:
    # Releases have keys and values of layers that do not use them.
    borrowers = [
        str(i) for i, layer in enumerate(architecture.layers) if layer.caches_of is not None
    ]
    unused = rf".*\.layers\.({'|'.join(borrowers)})\.self_attn\.[kv]_(proj|norm)\..*"
    names = dataclasses.replace(
        LLAMA_NAMES.with_rules(
            gate=_router,
            input_norm=lambda place: Tensor(f"{place.parent}.scale", place.pieces[0]),
        ),
        renamed={"per_layer_input": "", "per_layer_inputs": "", "moe": "", "gate": "router"},
        ignored=(*LLAMA_NAMES.ignored, *([unused] if borrowers else [])),
    )
    names = stacked_or_each(
        names, architecture, stacked_experts("experts.gate_up_proj", "experts.down_proj")
    )
    if architecture.name != _IN_LARGER_MODEL:
        return names
    if architecture.tower is None:
        return inside_larger_model(names)
    return beside_embed_vision(names, architecture.tower)


def _router(place: Place) -> Source:
    """Numbers of experts are beside the projection to them."""
    (shape,) = place.pieces
    if place.leaf == "weight":
        return place.tensor("router.proj", shape)
    return Tensor(f"{place.parent}.router.{place.leaf}", shape)


FAMILY = Family(
    read=read,
    checkpoint=_checkpoint,
    tiny={
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 8,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 8,
        "intermediate_size": 96,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 400,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 3.0,
        "rope_theta": None,
        "tie_word_embeddings": True,
    },
    tower=tower.read,
    tiny_config_around={
        "architectures": [_IN_LARGER_MODEL],
        "model_type": "gemma4",
        "image_token_id": 3,
        "boi_token_id": 4,
        "eoi_token_id": 5,
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 2240,
            "use_clipped_linears": True,
            "standardize": True,
        },
    },
    tiny_preprocessor={
        "image_processor_type": "Gemma4ImageProcessor",
        "processor_class": "Gemma4Processor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": False,
        "do_convert_rgb": True,
        "image_mean": [0.0, 0.0, 0.0],
        "image_std": [1.0, 1.0, 1.0],
        "max_soft_tokens": 70,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "rescale_factor": 0.00392156862745098,
        "resample": 3,
    },
    tiny_image_tokens=("<|image|>", "<|image>", "<image|>"),
    # Nothing else makes scores small.
    tiny_gains={"k_norm": 0.2, "proj": 16.0},
    harmless=AROUND_DECODER
    | {
        "default_output_length": "the processor says how many tokens an image has",
        "max_position_embeddings": "of a tower; the decoder reads its own",
    }
    | {
        field: "describes experts, which a model has only with enable_moe_block"
        for field in ("num_experts", "top_k_experts", "moe_intermediate_size")
    },
)
