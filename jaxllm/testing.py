"""Tiny real models, made on the spot: for tests, docs and benchmarks, without network or torch.

A tiny checkpoint is a model directory like any other: transformers loads it, too. Its weights are
random, scaled so that logits spread about as far as those of a trained model and greedy decoding
wanders instead of repeating one token.
"""

import functools
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

EOS, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 384

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 32,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "head_dim": 32,
    },
}
# ChatML, as Qwen writes it.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What the tokenizer's merges are learnt from.
_TEXT = """
The engine keeps a queue of requests. Each request is a prompt and the tokens that were made of it.
In every step the scheduler chooses which requests run, how many tokens of each, and in which blocks
of the cache their keys and values are written. The device then computes one step for all of them,
and the sampler chooses the next token of each request. When a request has ended, its blocks are
free again, and another request that was waiting can take them. Hello, how are you today? What is
the weather like, and where shall we go? I think that we should stay here and read a book about the
sea. There was once a small house on a hill; in the house lived an old man who told stories to the
children of the town. One, two, three, four, five, six, seven, eight, nine, ten. def main(): return
"""


def make_tiny_checkpoint(
    path: str | Path,
    family: Family = "llama",
    *,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    **config_overrides: Any,
) -> Path:
    """Write a model directory: config, weights, generation config, tokenizer, chat template.

    Args:
      config_overrides: fields of config.json, such as num_key_value_heads=1 or
        rope_scaling={"rope_type": "linear", "factor": 2.0}.
    """
    from safetensors.numpy import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = _COMMON | _FAMILIES[family] | {"dtype": dtype} | config_overrides
    _write_json(path / "config.json", config)
    ids = {"bos_token_id": None, "eos_token_id": config["eos_token_id"], "pad_token_id": None}
    _write_json(path / "generation_config.json", ids)
    save_file(tiny_weights(config, seed), path / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(path)
    return path


def tiny_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Random weights for a config.json, under the names of a checkpoint."""
    import ml_dtypes

    dtype = np.dtype({"bfloat16": ml_dtypes.bfloat16}.get(config["dtype"], config["dtype"]))
    rng = np.random.default_rng(seed)
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim") or hidden // heads
    is_qwen2, is_qwen3 = config["model_type"] == "qwen2", config["model_type"] == "qwen3"
    weights: dict[str, np.ndarray] = {}

    def add_linear(name: str, out_size: int, in_size: int, *, bias: bool, gain: float) -> None:
        weight = rng.standard_normal((out_size, in_size)) * (gain / in_size**0.5)
        weights[f"{name}.weight"] = weight.astype(dtype)
        if bias:
            weights[f"{name}.bias"] = (0.2 * rng.standard_normal(out_size)).astype(dtype)

    def add_norm(name: str, size: int, *, gain: float = 1.0) -> None:
        weights[f"{name}.weight"] = (gain + 0.1 * rng.standard_normal(size)).astype(dtype)

    add_linear("model.embed_tokens", config["vocab_size"], hidden, bias=False, gain=1.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        all_biased = config.get("attention_bias", False)
        sizes = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        for name, count in sizes.items():
            # Sharp attention: what a token sees depends on all before it.
            gain = 1.0 if name == "v_proj" else 1.5
            add_linear(
                f"{prefix}.self_attn.{name}",
                count * head_size,
                hidden,
                bias=all_biased or is_qwen2,
                gain=gain,
            )
        add_linear(
            f"{prefix}.self_attn.o_proj", hidden, heads * head_size, bias=all_biased, gain=2.0
        )
        if is_qwen3:
            add_norm(f"{prefix}.self_attn.q_norm", head_size, gain=1.5)
            add_norm(f"{prefix}.self_attn.k_norm", head_size, gain=1.5)
        mlp_bias = config.get("mlp_bias", False)
        add_linear(f"{prefix}.mlp.gate_proj", ffn, hidden, bias=mlp_bias, gain=1.5)
        add_linear(f"{prefix}.mlp.up_proj", ffn, hidden, bias=mlp_bias, gain=1.5)
        add_linear(f"{prefix}.mlp.down_proj", hidden, ffn, bias=mlp_bias, gain=1.5)
        add_norm(f"{prefix}.input_layernorm", hidden)
        add_norm(f"{prefix}.post_attention_layernorm", hidden)
    add_norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        add_linear("lm_head", config["vocab_size"], hidden, bias=False, gain=1.0)
    return weights


def _write_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    )


@functools.cache
def _tokenizer_json() -> str:
    """A byte-level BPE tokenizer: any text survives encoding and decoding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    return tokenizer.to_str()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
