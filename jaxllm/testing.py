"""Makes tiny real models for tests, docs and benchmarks, without network or torch.

A tiny checkpoint is an ordinary model directory, which transformers loads too. Its weights are
random, scaled so that logits spread about as far as those of a trained model, and greedy decoding
does not repeat one token.
"""

import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

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
# How far the outputs of modules spread. Attention is sharp, so every token in the context matters.
_GAINS = {
    "embed_tokens": 1.0, "q_proj": 1.5, "k_proj": 1.5, "v_proj": 1.0, "o_proj": 2.0,
    "q_norm": 1.5, "k_norm": 1.5, "gate_proj": 1.5, "up_proj": 1.5, "down_proj": 1.5,
    "input_layernorm": 1.0, "post_attention_layernorm": 1.0, "norm": 1.0, "lm_head": 1.0,
    "qkv_proj": 1.5, "gate_up_proj": 1.5, "query_layernorm": 1.5, "key_layernorm": 1.5,
    "c_fc": 1.5, "c_proj": 1.5,
}  # fmt: skip
# ChatML, as Qwen writes it.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Likewise, with a mark in place of each image.
_CHAT_WITH_IMAGES = _CHAT_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'video' %}VIDEO{% else %}"
    "{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}",
)
# The text from which the tokenizer learns its merges.
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
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    sees_images: bool = False,
    **config_overrides: Any,
) -> Path:
    """Write a model directory: config, weights, generation config, tokenizer, chat template.

    Args:
      family: one of `jaxllm.models.registry.family_names()`; with a tower also one of
        `around_names()`.
      sees_images: whether it has a tower for images, and what belongs to one, as in the family
        'mistral3'.
      config_overrides: fields of config.json, such as num_key_value_heads=1 or
        rope_scaling={"rope_type": "linear", "factor": 2.0}.
    """
    from safetensors.numpy import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = decoder = tiny_config(family) | {"dtype": dtype} | config_overrides
    image_tokens = ()
    if sees_images:
        config, image_tokens = _around_decoder(path, family, config)
    _write_json(path / "config.json", config)
    ids = {"bos_token_id": None, "eos_token_id": decoder["eos_token_id"], "pad_token_id": None}
    _write_json(path / "generation_config.json", ids)
    save_file(tiny_weights(config, seed), path / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(path, image_tokens)
    return path


def make_tiny_adapter(
    path: str | Path,
    model_dir: str | Path,
    *,
    seed: int = 1,
    rank: int = 4,
    target_modules: Sequence[str] = ("q_proj", "v_proj", "up_proj", "down_proj"),
    **config: Any,
) -> Path:
    """Write an adapter of a model, as PEFT does: random matrices that change every answer.

    Args:
      target_modules: the last names of the layers that it changes.
      config: further fields of adapter_config.json, such as use_rslora=True.
    """
    from safetensors.numpy import save_file

    from jaxllm.files import read_json
    from jaxllm.lora.adapter_config import AdapterConfig
    from jaxllm.lora.device import adaptable_layers, targets_of
    from jaxllm.models.architecture import read_architecture
    from jaxllm.models.registry import ModelRegistry

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    fields |= {"target_modules": list(target_modules), "base_model_name_or_path": str(model_dir)}
    _write_json(path / "adapter_config.json", fields | config)
    architecture = read_architecture(read_json(Path(model_dir) / "config.json"), sees_images=True)
    model = ModelRegistry.resolve([architecture.name]).abstract(architecture, np.float32)
    its_config, rng = AdapterConfig.read(path), np.random.default_rng(seed)
    tensors = {}
    # In the first of the layouts of checkpoints.
    of_layout = {layer for target in targets_of(model) for layer in target.layers}
    for layer, (inputs, outputs) in adaptable_layers(model).items():
        if layer in of_layout and layer.rpartition(".")[2] in target_modules:
            of_layer = its_config.rank_of(layer)
            a = rng.standard_normal((of_layer, inputs)) / inputs**0.5
            b = rng.standard_normal((outputs, of_layer)) / (4 * of_layer) ** 0.5
            name = f"base_model.model.{layer}.lora_"
            tensors |= {f"{name}A.weight": a, f"{name}B.weight": b}
    save_file(
        {name: tensor.astype(np.float32) for name, tensor in tensors.items()},
        path / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    return path


def tiny_config(family: str) -> dict[str, Any]:
    """The config.json of a family's tiny model, but for its dtype."""
    from jaxllm.models.registry import load_family

    tiny = load_family(family).tiny
    # Others, like the config classes of transformers, write to what is inside.
    fields = copy.deepcopy(_COMMON | dict(tiny))
    return {name: value for name, value in fields.items() if value is not None or name not in tiny}


def _around_decoder(
    path: Path, family: str, decoder: dict[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The config of a model with a tower around a decoder, and the tokens for images. Writes what
    the tower's images are made by."""
    from jaxllm.models.registry import load_family

    described = load_family(family)
    assert described.tower is not None, f"{family} has no tower"
    _write_json(path / "preprocessor_config.json", dict(described.tiny_preprocessor))
    outer = copy.deepcopy(dict(described.tiny_config_around))
    for name in ("dtype", "tie_word_embeddings"):
        outer[name] = decoder.pop(name)
    return outer | {"text_config": decoder}, described.tiny_image_tokens


def tiny_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Random weights for a config.json, under the names of a checkpoint."""
    import ml_dtypes

    from jaxllm.models.architecture import read_architecture
    from jaxllm.models.registry import ModelRegistry
    from jaxllm.weights.loader import parameters_of, sources_of

    architecture = read_architecture(config, sees_images=True)
    model = ModelRegistry.resolve([architecture.name]).abstract(architecture, np.float32)
    sources = sources_of(parameters_of(model), model.checkpoint_map).values()
    shapes = {rows.tensor.name: rows.tensor.shape for s in sources for rows in s.rows()}
    dtype = np.dtype({"bfloat16": ml_dtypes.bfloat16}.get(config["dtype"], config["dtype"]))
    rng = np.random.default_rng(seed)
    # Weights of norms are stored without it.
    offset = getattr(architecture.final_norm, "offset", 0.0)
    gains = _GAINS | dict(ModelRegistry.family(architecture.name).tiny_gains)
    return {
        name: _random_tensor(name, shapes[name], gains, offset, rng).astype(dtype)
        for name in sorted(shapes, key=_place_in_order)
    }


# Numbers that bound what goes into a product and comes out, with their signs.
_BOUNDS = {"input_min": -1, "input_max": 1, "output_min": -1, "output_max": 1}


def _random_tensor(
    name: str,
    shape: tuple[int, ...],
    gains: dict[str, float],
    offset: float,
    rng: np.random.Generator,
) -> np.ndarray:
    module, leaf = name.split(".")[-2:]
    gain = gains.get(module, 1.0)
    if leaf in _BOUNDS:
        return np.array(_BOUNDS[leaf] * (1.5 + 0.1 * rng.standard_normal()))
    if leaf == "bias":
        return 0.2 * rng.standard_normal(shape)
    if len(shape) == 1 or module.endswith("norm"):
        return gain - offset + 0.1 * rng.standard_normal(shape)
    return rng.standard_normal(shape) * (gain / shape[-1] ** 0.5)


def _place_in_order(name: str) -> tuple[Any, ...]:
    """The sort key of a tensor: by layer, then by the order of _GAINS, weights before biases. So
    the random numbers do not depend on the order of a model's parameters."""
    *path, module, leaf = name.split(".")
    layer = next((int(part) for part in path if part.isdigit()), None)
    modules = list(_GAINS)
    rank = modules.index(module) if module in modules else len(modules)
    is_first, is_last = module == modules[0], layer is None
    return not is_first, is_last, layer or 0, rank, module, leaf != "weight"


def _write_tokenizer(path: Path, image_tokens: tuple[str, ...]) -> None:
    (path / "tokenizer.json").write_text(_tokenizer_json(image_tokens), encoding="utf-8")
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "chat_template": _chat_template(image_tokens),
        },
    )


def _chat_template(image_tokens: tuple[str, ...]) -> str:
    """The template of a chat, with the tokens of an image, those around it and that of a video, as
    far as the family has them."""
    if not image_tokens:
        return _CHAT_TEMPLATE
    image, *around, video = image_tokens if len(image_tokens) > 3 else (*image_tokens, "")
    written = video.join(around[:2]) if video else ""
    return _CHAT_WITH_IMAGES.replace("IMAGE", image).replace("VIDEO", written)


@functools.cache
def _tokenizer_json(image_tokens: tuple[str, ...]) -> str:
    """A byte-level BPE tokenizer: any text survives encoding and decoding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS, START, END, *image_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    return tokenizer.to_str()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
