"""Qwen3-Next and Qwen3.5, and the heads of their checkpoints, by plain formulas in numpy.

Every token is computed in float64, the recurrence token by token. The models are tiny checkpoints
to which `tests.heads.add_mtp` has added a head.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


class HybridFormulas:
    def __init__(self, model: Path):
        self._config = json.loads((model / "config.json").read_text())
        tensors = load_file(model / "model.safetensors")
        self._of = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def drafts(self, text: list[int], count: int) -> list[int]:
        """The tokens that the head guesses after a text, greedily."""
        embed, hidden, tokens = self._of["model.embed_tokens.weight"], self._hidden(text), text[1:]
        hidden = hidden[:-1]
        for _ in range(count):
            out = self._read(embed[tokens], hidden)
            tokens = [*tokens, int(np.argmax(self._of["lm_head.weight"] @ out[-1]))]
            hidden = np.concatenate([hidden, out[-1:]])
        return tokens[-count:]

    def _hidden(self, text: list[int]) -> np.ndarray:
        x = self._of["model.embed_tokens.weight"][text]
        for index in range(self._config["num_hidden_layers"]):
            x = self._layer(x, f"model.layers.{index}")
        return self._norm(x, "model.norm")

    def _read(self, embedded: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        normed = self._norm(embedded, "mtp.pre_fc_norm_embedding")
        both = np.concatenate([normed, self._norm(hidden, "mtp.pre_fc_norm_hidden")], axis=1)
        return self._norm(self._layer(self._linear(both, "mtp.fc"), "mtp.layers.0"), "mtp.norm")

    def _layer(self, x: np.ndarray, at: str) -> np.ndarray:
        is_recurrent = f"{at}.linear_attn.A_log" in self._of
        mix = self._delta if is_recurrent else self._attention
        normed = self._norm(x, f"{at}.input_layernorm")
        x = x + mix(normed, f"{at}.linear_attn" if is_recurrent else f"{at}.self_attn")
        normed = self._norm(x, f"{at}.post_attention_layernorm")
        has_experts = f"{at}.mlp.gate.weight" in self._of
        return x + (self._experts if has_experts else self._mlp)(normed, f"{at}.mlp")

    def _attention(self, x: np.ndarray, at: str) -> np.ndarray:
        heads, kv_heads = (self._config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
        q, k, v = (
            self._linear(x, f"{at}.{name}_proj").reshape(len(x), count, -1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, gate = np.split(q, 2, axis=-1)
        q, k = (self._rotated(self._norm(y, f"{at}.{n}_norm")) for y, n in ((q, "q"), (k, "k")))
        k, v = (np.repeat(y, heads // kv_heads, axis=1) for y in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        mixed = np.einsum("hqk,khd->qhd", _softmax(scores), v) * _sigmoid(gate)
        return self._linear(mixed.reshape(len(x), -1), f"{at}.o_proj")

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        of_rope = self._config.get("rope_parameters") or self._config
        half = int(x.shape[-1] * of_rope["partial_rotary_factor"]) // 2
        rates = of_rope["rope_theta"] ** (-np.arange(half) / half)
        angles = (np.arange(len(x))[:, None] * rates)[:, None]
        a, b, rest = np.split(x, [half, 2 * half], axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    def _delta(self, x: np.ndarray, at: str) -> np.ndarray:
        key_heads, heads, key_size, value_size = (
            self._config[f"linear_{name}"]
            for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        )
        share = heads // key_heads
        if f"{at}.in_proj_qkvz.weight" in self._of:
            # Each key head has its rows of every part.
            sizes = np.cumsum([key_size, key_size, share * value_size])
            of_heads = self._linear(x, f"{at}.in_proj_qkvz").reshape(len(x), key_heads, -1)
            parts = np.split(of_heads, sizes, axis=2)
            *qkv, z = (part.reshape(len(x), -1) for part in parts)
            qkv = np.concatenate(qkv, axis=1)
            of_heads = self._linear(x, f"{at}.in_proj_ba").reshape(len(x), key_heads, -1)
            b, a = (part.reshape(len(x), -1) for part in np.split(of_heads, 2, axis=2))
        else:
            qkv, z, b, a = (
                self._linear(x, f"{at}.in_proj_{name}") for name in ("qkv", "z", "b", "a")
            )
        taps = self._of[f"{at}.conv1d.weight"][:, 0].T
        padded = np.concatenate([np.zeros((len(taps) - 1, qkv.shape[1])), qkv])
        qkv = _silu(sum(tap * padded[i : i + len(x)] for i, tap in enumerate(taps)))
        keys = key_heads * key_size
        q, k, v = (
            part.reshape(len(x), -1, size)
            for part, size in zip(
                np.split(qkv, [keys, 2 * keys], axis=1),
                (key_size, key_size, value_size),
                strict=True,
            )
        )
        q, k = (
            np.repeat(y / np.sqrt(np.sum(y * y, -1, keepdims=True) + 1e-6), share, axis=1)
            for y in (q, k)
        )
        step = np.log1p(np.exp(a + self._of[f"{at}.dt_bias"]))
        decay, beta = np.exp(-np.exp(self._of[f"{at}.A_log"]) * step), _sigmoid(b)
        state, outputs = np.zeros((heads, key_size, value_size)), []
        for t in range(len(x)):
            state = state * decay[t][:, None, None]
            missing = v[t] - np.einsum("hk,hkv->hv", k[t], state)
            state = state + np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * missing)
            outputs.append(np.einsum("hk,hkv->hv", q[t] / key_size**0.5, state))
        out = self._over_root_mean_square(np.stack(outputs)) * self._of[f"{at}.norm.weight"]
        out = out.reshape(len(x), -1) * _silu(z)
        return self._linear(out, f"{at}.out_proj")

    def _experts(self, x: np.ndarray, at: str) -> np.ndarray:
        shared = self._mlp(x, f"{at}.shared_expert")
        total = shared * _sigmoid(self._linear(x, f"{at}.shared_expert_gate"))
        weights = _softmax(self._linear(x, f"{at}.gate"))
        for t, of_token in enumerate(weights):
            best = np.argsort(-of_token)[: self._config["num_experts_per_tok"]]
            for expert in best:
                factor = of_token[expert] / of_token[best].sum()
                total[t] += factor * self._mlp(x[t], f"{at}.experts.{expert}")
        return total

    def _mlp(self, x: np.ndarray, at: str) -> np.ndarray:
        gate, up = (self._linear(x, f"{at}.{name}_proj") for name in ("gate", "up"))
        return self._linear(_silu(gate) * up, f"{at}.down_proj")

    def _linear(self, x: np.ndarray, at: str) -> np.ndarray:
        return x @ self._of[f"{at}.weight"].T

    def _norm(self, x: np.ndarray, at: str) -> np.ndarray:
        """The weights are stored around zero."""
        return self._over_root_mean_square(x) * (1 + self._of[f"{at}.weight"])

    def _over_root_mean_square(self, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self._config["rms_norm_eps"])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _silu(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(x)


def _softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
