"""The tensors of GGUF files, by the names that checkpoints of the same models have.

Writers of GGUF change more than names: they reorder rows of queries and keys that are rotated in
pairs, add the one that some norms add to their weights, and stack experts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.gguf.blocks import TYPES
from jaxllm.gguf.file import TensorPlace


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor of a checkpoint, and how it is kept in a file."""

    place: TensorPlace
    expert: int | None = None  # the index on the first axis; None: it is the whole tensor
    head_size: int | None = None  # of rows whose pairs are neighbours; None: they are in order
    added: float = 0.0  # to every value

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape if self.expert is None else self.place.shape[1:]

    @property
    def is_coded(self) -> bool:
        return TYPES[self.place.type].codes is not None


class Naming(NamedTuple):
    """How the tensors of an architecture are named in a checkpoint."""

    whole: Mapping[str, str]
    of_layer: Mapping[str, str]
    of_expert: Mapping[str, str] = {}
    has_pairs: bool = False  # rotated queries and keys have their pairs as neighbours
    adds_one: bool = False  # norms have 1 added


_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_DENSE = Naming(_WHOLE, _ATTENTION | _MLP)
_MOE = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_norm": "post_attention_layernorm",
}
NAMINGS = {
    "llama": _DENSE._replace(has_pairs=True),
    "mixtral": Naming(
        _WHOLE,
        _ATTENTION
        | {"ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "block_sparse_moe.gate"},
        {
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
        has_pairs=True,
    ),
    "qwen2": _DENSE,
    "qwen3": Naming(_WHOLE, _ATTENTION | _QK_NORM | _MLP),
    "qwen3moe": Naming(
        _WHOLE,
        _ATTENTION | _QK_NORM | _MOE,
        {
            "ffn_gate_exps": "mlp.experts.{}.gate_proj",
            "ffn_up_exps": "mlp.experts.{}.up_proj",
            "ffn_down_exps": "mlp.experts.{}.down_proj",
        },
    ),
    "gemma": _DENSE._replace(adds_one=True),
    "gemma2": Naming(_WHOLE, _ATTENTION | _MLP | _SANDWICH, adds_one=True),
    "gemma3": Naming(_WHOLE, _ATTENTION | _QK_NORM | _MLP | _SANDWICH, adds_one=True),
    "phi3": Naming(
        _WHOLE,
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
}
# What the config says in another way.
FREQUENCIES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_IN_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_WHOLE_TENSOR = re.compile(r"(\w+)\.(weight|bias)")


def stored_tensors(
    tensors: Mapping[str, TensorPlace], naming: Naming, head_size: int
) -> dict[str, Stored]:
    """The tensors of a checkpoint, by its own names. Refuses tensors that nothing here knows."""
    stored: dict[str, Stored] = {}
    for name, place in tensors.items():
        if name in FREQUENCIES:
            continue
        if len(place.shape) == 1 and TYPES[place.type].codes is not None:
            raise UnsupportedModelError(
                f"tensor {name:.200} has one axis and the type {place.type_name}; supported are "
                "floats"
            )
        for known, its in _known_as(name, place, naming, head_size).items():
            stored[known] = its
    return stored


def _known_as(name: str, place: TensorPlace, naming: Naming, head_size: int) -> dict[str, Stored]:
    if match := _IN_LAYER.fullmatch(name):
        layer, module, leaf = match.groups()
        parent = f"model.layers.{int(layer)}."
        if module in naming.of_expert and len(place.shape) == 3:
            pattern = f"{parent}{naming.of_expert[module]}.{leaf}"
            return {
                pattern.format(expert): Stored(place=place, expert=expert)
                for expert in range(place.shape[0])
            }
        if module in naming.of_layer:
            is_rotated = naming.has_pairs and module in ("attn_q", "attn_k")
            is_norm = naming.adds_one and module.endswith("_norm")
            its = Stored(
                place=place,
                head_size=head_size if is_rotated else None,
                added=1.0 if is_norm else 0.0,
            )
            return {f"{parent}{naming.of_layer[module]}.{leaf}": its}
    elif match := _WHOLE_TENSOR.fullmatch(name):
        module, leaf = match.groups()
        if module in naming.whole:
            added = 1.0 if naming.adds_one and module == "output_norm" else 0.0
            return {f"{naming.whole[module]}.{leaf}": Stored(place=place, added=added)}
    raise CheckpointError(
        f"{place.file} has the tensor {name:.200}, which models of its architecture do not have"
    )
