"""Makes the config.json of a model of its metadata: the fields that its class in transformers has.

Only architectures whose keys and tensors are known are read. What other programs know of an
architecture without a key (a scale, a rotation's base) is written down here.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.gguf.blocks import TYPES
from jaxllm.gguf.file import TensorPlace
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.names import NAMINGS, Naming

_LARGEST_FACTORS = 1 << 12  # of a rotation's frequencies


class Described(NamedTuple):
    """A model as its config.json says it, and how its tensors are named."""

    config: dict[str, Any]
    naming: Naming
    head_size: int


def describe(
    metadata: Metadata,
    tensors: Mapping[str, TensorPlace],
    read_floats: Callable[[str], np.ndarray],
) -> Described:
    """Describe a model. `read_floats` reads a tensor of floats."""
    kind = metadata.architecture
    if kind not in _READERS:
        raise UnsupportedModelError(
            f"GGUF files of the architecture {shown(kind)} are not supported; supported are "
            f"{', '.join(_READERS)}; give the checkpoint in safetensors that the file was made of"
        )
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError("the GGUF file has no tensor token_embd.weight of two axes")
    heads = metadata.size("attention.head_count")
    hidden = metadata.size("embedding_length")
    head_size = metadata.optional_size("attention.key_length") or hidden // heads
    of_values = metadata.optional_size("attention.value_length")
    if of_values not in (None, head_size):
        raise UnsupportedModelError(
            f"{kind}.attention.value_length={of_values} is not supported beside keys of {head_size}"
        )
    common = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": metadata.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.optional_size("attention.head_count_kv") or heads,
        "head_dim": head_size,
        "max_position_embeddings": metadata.size("context_length"),
        "intermediate_size": metadata.optional_size("feed_forward_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": _dtype(tensors),
    }
    if common["rms_norm_eps"] is None:
        raise CheckpointError(f"the GGUF file lacks {kind}.attention.layer_norm_rms_epsilon")
    rotated = metadata.optional_size("rope.dimension_count")
    if kind != "phi3" and rotated not in (None, head_size):
        raise UnsupportedModelError(
            f"{kind}.rope.dimension_count={rotated} is not supported beside heads of {head_size}"
        )
    if metadata.own_flag("attention.causal") is False:
        raise UnsupportedModelError(f"{kind}.attention.causal=False is not supported")
    rope = _rope(metadata, tensors, read_floats, common)
    naming, own = _READERS[kind](metadata, tensors, common)
    metadata.refuse_unread()
    config = common | rope | own
    given = {name: value for name, value in config.items() if value is not None}
    return Described(given, NAMINGS[naming], head_size)


def _dtype(tensors: Mapping[str, TensorPlace]) -> str:
    """The type in which a model computes: of its largest tensors of floats, or else bfloat16."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    matrices = {place.type_name for place in tensors.values() if len(place.shape) > 1}
    if matrices <= names.keys() and len(matrices) == 1:
        return names[matrices.pop()]
    return "bfloat16"


def _rope(
    metadata: Metadata,
    tensors: Mapping[str, TensorPlace],
    read_floats: Callable[[str], np.ndarray],
    common: Mapping[str, Any],
) -> dict[str, Any]:
    """How the rotation is scaled."""
    kind = metadata.word("rope.scaling.type")
    factor = metadata.number("rope.scaling.factor")
    original = metadata.optional_size("rope.scaling.original_context_length")
    attention = metadata.number("rope.scaling.attn_factor")
    old_factor = metadata.number("rope.scale_linear")
    if "rope_freqs.weight" in tensors:
        # Factors by which frequencies are divided: Llama 3 has computed them, at every length.
        factors = _factors("rope_freqs.weight", tensors, read_floats)
        longest = common["max_position_embeddings"]
        return {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "attention_factor": 1.0,
                "original_max_position_embeddings": longest,
            }
        }
    if "rope_factors_long.weight" in tensors:
        if original is None:
            raise CheckpointError(
                "the GGUF file has factors of long contexts, and lacks "
                f"{metadata.architecture}.rope.scaling.original_context_length"
            )
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "short_factor": _factors("rope_factors_short.weight", tensors, read_floats),
            "long_factor": _factors("rope_factors_long.weight", tensors, read_floats),
        }
        if attention is not None:
            scaling["attention_factor"] = attention
        return {"rope_scaling": scaling, "original_max_position_embeddings": original}
    match kind:
        case None | "none":
            linear = old_factor if old_factor not in (None, 0.0, 1.0) else None
            if linear is None:
                return {"original_max_position_embeddings": None}
            return {"rope_scaling": {"rope_type": "linear", "factor": linear}}
        case "linear":
            return {"rope_scaling": {"rope_type": "linear", "factor": factor or 1.0}}
        case "yarn":
            scaling = {"rope_type": "yarn", "factor": factor or 1.0}
            if original is not None:
                scaling["original_max_position_embeddings"] = original
            return {"rope_scaling": scaling}
    raise UnsupportedModelError(
        f"{metadata.architecture}.rope.scaling.type={shown(kind)} is not supported in a GGUF file"
    )


def _factors(
    name: str,
    tensors: Mapping[str, TensorPlace],
    read_floats: Callable[[str], np.ndarray],
) -> list[float]:
    place = tensors.get(name)
    if place is None or len(place.shape) != 1 or place.shape[0] > _LARGEST_FACTORS:
        raise CheckpointError(f"the GGUF file lacks the tensor {name}, a list of factors")
    if TYPES[place.type].codes is not None:
        raise UnsupportedModelError(f"tensor {name} of the type {place.type_name} is not supported")
    return read_floats(name).astype(np.float64).tolist()


Read = tuple[str, dict[str, Any]]  # the naming of tensors, and fields


def _read_llama(
    metadata: Metadata, tensors: Mapping[str, TensorPlace], common: Mapping[str, Any]
) -> Read:
    experts = metadata.optional_size("expert_count") if _has_experts(tensors) else None
    if experts is None:
        for name in ("expert_count", "expert_used_count"):
            metadata.number(name)  # zero
        bias = "blk.0.attn_q.bias" in tensors
        return "llama", {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": bias,
        }
    return "mixtral", {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": metadata.size("expert_used_count"),
    }


def _has_experts(tensors: Mapping[str, TensorPlace]) -> bool:
    return "blk.0.ffn_gate_inp.weight" in tensors


def _read_qwen2(
    metadata: Metadata, tensors: Mapping[str, TensorPlace], common: Mapping[str, Any]
) -> Read:
    return "qwen2", {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def _read_qwen3(
    metadata: Metadata, tensors: Mapping[str, TensorPlace], common: Mapping[str, Any]
) -> Read:
    return "qwen3", {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def _read_qwen3_moe(
    metadata: Metadata, tensors: Mapping[str, TensorPlace], common: Mapping[str, Any]
) -> Read:
    return "qwen3moe", {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        # No key says so; every release has it.
        "norm_topk_prob": True,
    }


_GEMMA = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _read_gemma(
    metadata: Metadata, tensors: Mapping[str, TensorPlace], common: Mapping[str, Any]
) -> Read:
    return "gemma", {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", **_GEMMA}


def _read_gemma2(
    metadata: Metadata, tensors: Mapping[str, TensorPlace], common: Mapping[str, Any]
) -> Read:
    return "gemma2", {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.size("attention.sliding_window"),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.number("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(common, num_layers_of_27b=46),
    }


def _read_gemma3(
    metadata: Metadata, tensors: Mapping[str, TensorPlace], common: Mapping[str, Any]
) -> Read:
    return "gemma3", {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.size("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
        "final_logit_softcapping": metadata.number("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(common, num_layers_of_27b=62),
    }


def _query_scalar(common: Mapping[str, Any], num_layers_of_27b: int) -> int:
    """What scores are divided by the root of. No key says so: it is the size of heads, except in
    the largest models."""
    if common["num_hidden_layers"] == num_layers_of_27b:
        return common["hidden_size"] // common["num_attention_heads"]
    return common["head_dim"]


def _read_phi3(
    metadata: Metadata, tensors: Mapping[str, TensorPlace], common: Mapping[str, Any]
) -> Read:
    rotated = metadata.optional_size("rope.dimension_count") or common["head_dim"]
    fields = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "sliding_window": metadata.optional_size("attention.sliding_window"),
    }
    if rotated != common["head_dim"]:
        fields["partial_rotary_factor"] = rotated / common["head_dim"]
    return "phi3", fields


_READERS: dict[str, Callable[[Metadata, Mapping[str, TensorPlace], Mapping[str, Any]], Read]] = {
    "llama": _read_llama,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
    "qwen3moe": _read_qwen3_moe,
    "gemma": _read_gemma,
    "gemma2": _read_gemma2,
    "gemma3": _read_gemma3,
    "phi3": _read_phi3,
}
