"""Tiny heads that draft: written beside a tiny model, and computed by plain formulas."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxllm.models.architecture import read_architecture
from jaxllm.models.draft_head import HeadSpec
from jaxllm.models.read_eagle import read_eagle
from jaxllm.models.registry import ModelRegistry
from jaxllm.testing import make_tiny_checkpoint
from jaxllm.weights.loader import parameters_of, sources_of

Tensors = dict[str, np.ndarray]

# Fields of a model's config that are its head's as well.
_COMMON = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_theta", "eos_token_id", "dtype",
)  # fmt: skip


def add_mtp(model: Path, **exactly: np.ndarray) -> Tensors:
    """Add the head that a model's family has to its checkpoint; return its tensors. Those whose
    names end in `exactly` are given."""
    architecture = read_architecture(_config(model))
    read = ModelRegistry.family(architecture.name).draft_head
    assert read is not None, architecture.name
    tensors = _random(read(architecture))
    for end, value in exactly.items():
        (name,) = (name for name in tensors if name.split(".")[-2] == end)
        assert tensors[name].shape == value.shape, (name, value.shape)
        tensors[name] = value
    file = model / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return tensors


def its_own_head(path: Path, window: int) -> str:
    """A model of one layer with a window, and a head with its weights, which goes by the tokens
    alone: both guess the same of a text longer than the window."""
    path = make_tiny_checkpoint(
        path,
        "mimo_v2",
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        mlp_layer_types=["dense"],
        sliding_window=window,
    )
    file = path / "model.safetensors"
    tensors = load_file(file)
    embed = tensors["model.embed_tokens.weight"]
    # So that the norm of embeddings changes nothing.
    embed /= np.sqrt(np.mean(np.square(embed), axis=1, keepdims=True))
    save_file(tensors, file, metadata={"format": "pt"})
    size = embed.shape[1]
    itself = {
        name.split(".")[-2].replace("post_attention", "pre_mlp"): value
        for name, value in tensors.items()
        if ".layers.0." in name and name.endswith(".weight")
    }
    add_mtp(
        path,
        **itself,
        enorm=np.ones(size, np.float32),
        eh_proj=np.eye(size, 2 * size, dtype=np.float32),
        final_layernorm=tensors["model.norm.weight"],
    )
    # The model's sinks, whose name is not that of a weight.
    sinks = {
        "model.mtp.layers.0.self_attn.attention_sink_bias": tensors[
            "model.layers.0.self_attn.attention_sink_bias"
        ]
    }
    save_file(load_file(file) | sinks, file, metadata={"format": "pt"})
    return str(path)


def make_eagle(path: Path, model: Path, method: Literal["eagle", "eagle3"], **config: Any) -> Path:
    """Write the directory of a head for a model of Llama's shape."""
    path.mkdir()
    of_model = _config(model)
    fields = (
        {name: of_model[name] for name in _COMMON if name in of_model}
        | {"model_type": "llama"}
        | config
    )
    fields |= {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
    (path / "config.json").write_text(json.dumps(fields))
    spec = read_eagle(method, fields, read_architecture(of_model), max_model_len=128)
    save_file(_random(spec), path / "model.safetensors", metadata={"format": "pt"})
    return path


def _config(model: Path) -> dict[str, Any]:
    return json.loads((model / "config.json").read_text())


def _random(spec: HeadSpec) -> Tensors:
    """Random tensors under the names of a checkpoint."""
    head, rng, tensors = spec.abstract(np.float32, 1), np.random.default_rng(0), {}
    for source in sources_of(parameters_of(head), head.checkpoint_map).values():
        for rows in source.rows():
            name, shape = rows.tensor.name, rows.tensor.shape
            if rows.tensor.kind == "int64":
                chosen = np.sort(rng.choice(spec.vocab_size, shape[0], replace=False))
                value = chosen - np.arange(shape[0])
            else:
                value = rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5
                value = 1 + value if len(shape) == 1 else value
            tensors[name] = value
    return tensors


class Formulas:
    """Llama, EAGLE and EAGLE-3 in numpy, of a tiny model's directory and of a head's."""

    def __init__(self, model: Path, head: Path, taps: tuple[int, ...] = ()):
        self._config, self._model = _config(model), load_file(model / "model.safetensors")
        self._head = load_file(head / "model.safetensors")
        self._taps = taps

    def drafts(self, text: list[int], count: int, among: Sequence[int] | None = None) -> list[int]:
        """The tokens that the head guesses after a text, greedily, of all or of some."""
        among = range(self._config["vocab_size"]) if among is None else among
        embed = self._model["model.embed_tokens.weight"]
        hidden = self._hidden(text)[:-1]
        tokens = text[1:]
        for _ in range(count):
            out = self._read(embed[tokens], hidden)
            tokens = [*tokens, among[int(np.argmax(self._logits(out[-1])[[*among]]))]]
            hidden = np.concatenate([hidden, out[-1:]])
        return tokens[-count:]

    def _hidden(self, text: list[int]) -> np.ndarray:
        """What the head reads of the model's hidden states."""
        x, streams = self._model["model.embed_tokens.weight"][text], []
        for index in range(self._config["num_hidden_layers"]):
            streams.append(x)
            at = f"model.layers.{index}"
            normed = self._norm(x, self._model[f"{at}.input_layernorm.weight"])
            x = self._layer(x, normed, self._model, at)
        streams.append(x)
        if not self._taps:
            return self._norm(x, self._model["model.norm.weight"])
        tapped = np.concatenate([streams[tap] for tap in self._taps], axis=1)
        return tapped @ self._head["fc.weight"].T

    def _read(self, embedded: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        if not self._taps:
            x = np.concatenate([embedded, hidden], axis=1) @ self._head["fc.weight"].T
            at = next(name for name in self._head if "o_proj" in name).split(".self_attn")[0]
            return self._layer(x, x, self._head, at)
        both = [
            self._norm(embedded, self._head["midlayer.input_layernorm.weight"]),
            self._norm(hidden, self._head["midlayer.hidden_norm.weight"]),
        ]
        return self._layer(hidden, np.concatenate(both, axis=1), self._head, "midlayer")

    def _logits(self, hidden: np.ndarray) -> np.ndarray:
        if not self._taps:
            return hidden @ self._model["lm_head.weight"].T
        own = self._norm(hidden, self._head["norm.weight"]) @ self._head["lm_head.weight"].T
        logits = np.full(self._config["vocab_size"], -np.inf)
        logits[np.arange(len(own)) + self._head["d2t"]] = own
        return logits

    def _layer(self, x: np.ndarray, seen: np.ndarray, of: Tensors, at: str) -> np.ndarray:
        """Llama's layer on the stream x, whose attention sees `seen`."""
        heads, kv_heads = (self._config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
        q, k, v = (
            (seen @ of[f"{at}.self_attn.{name}_proj.weight"].T).reshape(len(x), count, -1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = self._rotated(q), np.repeat(self._rotated(k), heads // kv_heads, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, np.repeat(v, heads // kv_heads, axis=1))
        x = x + mixed.reshape(len(x), -1) @ of[f"{at}.self_attn.o_proj.weight"].T
        normed = self._norm(x, of[f"{at}.post_attention_layernorm.weight"])
        gate, up = (normed @ of[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (gate / (1 + np.exp(-gate)) * up) @ of[f"{at}.mlp.down_proj.weight"].T

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        rates = self._config["rope_theta"] ** (-np.arange(half) / half)
        angles = (np.arange(len(x))[:, None] * rates)[:, None]
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def _norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        eps = self._config["rms_norm_eps"]
        return x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + eps) * weight
