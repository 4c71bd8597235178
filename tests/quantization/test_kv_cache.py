"""Models whose keys and values are cached as codes of 8 bits."""

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxllm_kernels.ragged_paged_attention.api import get_backend
from safetensors.numpy import load_file, save_file

from jaxllm.cache_config import CacheConfig
from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.quantization.kv_cache import read_declared
from jaxllm.testing import make_tiny_checkpoint
from tests.models.conftest import SingleRow

PROMPT = [5, 77, 201, 9, 300, 41, 8, 123, 64, 250, 17]
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {},
    "kv_cache_scheme": SCHEME,
}
# Of the keys and the values of the two heads.
SCALES = np.array([[0.03, 0.04], [0.05, 0.06]], np.float32)


def rounded(x, scales, codes: str):
    """The values [T, K, H] that codes with these scales [K] stand for."""
    x = x / scales[:, None]
    if codes == "int8":
        return jnp.clip(jnp.round(x), -127, 127) * scales[:, None]
    x = jnp.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(jnp.float32)
    return x * scales[:, None]


@dataclasses.dataclass(frozen=True)
class RoundsFirst:
    """Caches floats: those that codes would stand for."""

    codes: str
    scales: tuple[tuple[float, float], ...]

    def __getattr__(self, name):
        return getattr(get_backend("reference"), name)

    def attend(self, q, k, v, *others, **more):
        of_keys, of_values = jnp.asarray(self.scales, jnp.float32).T
        k, v = rounded(k, of_keys, self.codes), rounded(v, of_values, self.codes)
        return get_backend("reference").attend(q, k, v, *others, **more)


def write_scales(path, shapes_and_values, scheme=SCHEME):
    """Add scales to a tiny model: values by what follows the name of each layer's attention."""
    model = make_tiny_checkpoint(path)
    tensors = load_file(model / "model.safetensors")
    for layer in range(2):
        for name, value in shapes_and_values.items():
            tensors[f"model.layers.{layer}.self_attn.{name}"] = np.array(
                value, np.float32, order="C"
            )
    save_file(tensors, model / "model.safetensors")
    if scheme is not None:
        config = json.loads((model / "config.json").read_text())
        weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
        group = {"targets": ["re:nothing"], "weights": weights}
        declared = QUANTIZATION | {"kv_cache_scheme": scheme, "config_groups": {"group_0": group}}
        (model / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    return model


PER_TENSOR = np.broadcast_to(SCALES[0], (2, 2))
PER_HEAD = SCHEME | {"strategy": "attn_head"}
INT8 = SCHEME | {"type": "int"}
# How scales are named and shaped; what is declared; the type of the cache; what they are.
STORED = {
    "compressed-tensors": ({"k_scale": [0.03], "v_scale": [0.04]}, SCHEME, "auto", PER_TENSOR),
    "per head": (
        {"k_scale": SCALES[:, 0].reshape(2, 1, 1), "v_scale": SCALES[:, 1].reshape(2, 1, 1)},
        PER_HEAD, "auto", SCALES,
    ),
    "modelopt": ({"k_proj.k_scale": 0.03, "v_proj.v_scale": 0.04}, SCHEME, "fp8", PER_TENSOR),
    "fused": ({"qkv_proj.k_scale": [0.03], "qkv_proj.v_scale": [0.04]}, SCHEME, "fp8", PER_TENSOR),
    "old": ({"kv_scale": 0.05}, None, "fp8_e4m3", np.full((2, 2), 0.05)),
    "int8": ({"k_scale": [0.03], "v_scale": [0.04]}, INT8, "auto", PER_TENSOR),
    "none": ({}, None, "fp8", np.ones((2, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_attention_is_that_of_the_values_that_codes_stand_for(name, tmp_path):
    tensors, scheme, asked, scales = STORED[name]
    model = write_scales(tmp_path, tensors, scheme)
    coded = SingleRow(model, cache=CacheConfig(kv_cache_dtype=asked))
    plain = SingleRow(model)
    codes = "int8" if scheme is INT8 else "float8_e4m3fn"
    assert coded.abstract_model.attention_configs[0].kv_dtype == codes
    plain._backend = RoundsFirst(codes, tuple(map(tuple, scales.tolist())))
    expected = plain.logits(PROMPT)
    np.testing.assert_allclose(coded.logits(PROMPT), expected, atol=1e-4, rtol=0)
    if name == "per head":  # in chunks, later tokens read codes of earlier steps
        np.testing.assert_allclose(coded.logits(PROMPT, [3, 1, 7]), expected, atol=1e-4, rtol=0)


def test_each_layer_has_its_scales(tmp_path):
    model = write_scales(tmp_path, {"k_scale": [0.03], "v_scale": [0.04]})
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.v_scale"] = np.array([0.5], np.float32)
    save_file(tensors, model / "model.safetensors")
    weights = SingleRow(model, cache=CacheConfig()).weights["model"]["layers"]
    first, second = (np.asarray(weights[i]["self_attn"]["kv_scales"][...]) for i in (0, 1))
    np.testing.assert_array_equal(first, np.float32([[0.03, 0.04]] * 2))
    np.testing.assert_array_equal(second, np.float32([[0.03, 0.5]] * 2))


def test_layers_that_lend_their_keys_and_values_lend_the_scales(tmp_path):
    model = make_tiny_checkpoint(tmp_path, "gemma4")
    coded = SingleRow(model, cache=CacheConfig(kv_cache_dtype="fp8"))
    plain = SingleRow(model)
    assert any(layer.caches_of is not None for layer in coded.architecture.layers)

    @dataclasses.dataclass(frozen=True)
    class Rounds(RoundsFirst):
        def attend(self, q, k, v, *others, **more):
            ones = jnp.ones(k.shape[1])
            k, v = rounded(k, ones, self.codes), rounded(v, ones, self.codes)
            return get_backend("reference").attend(q, k, v, *others, **more)

    plain._backend = Rounds("float8_e4m3fn", ())
    np.testing.assert_allclose(coded.logits(PROMPT), plain.logits(PROMPT), atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ({}, "kv_cache_scheme declares scales .* and the checkpoint has none"),
        ({"k_scale": [0.03]}, "lacks 2 of the .* tensors .*v_scale"),
        ({"k_scale": [0.0], "v_scale": [0.04]}, "k_scale or .* scale that is not above zero"),
        ({"k_scale": [np.nan], "v_scale": [0.04]}, "scale that is not above zero"),
        ({"k_scale": [0.03, 0.04, 0.05], "v_scale": [1.0]}, "disagree in .* shape"),
    ],
)
def test_scales_that_are_not_there_or_not_right_are_refused(tensors, error, tmp_path):
    model = write_scales(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=error):
        SingleRow(model, cache=CacheConfig())
    # Whoever does not want them does without.
    if not tensors:
        SingleRow(model, cache=CacheConfig(kv_cache_dtype="bfloat16"), dtype="bfloat16")


@pytest.mark.parametrize(
    ("config", "codes"),
    [
        (None, None),
        ({"quant_method": "fp8"}, None),
        ({"kv_cache_scheme": None}, None),
        ({"kv_cache_scheme": "static"}, "float8_e4m3fn"),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "float8_e4m3fn"),
        ({"kv_cache_quant_algo": "INT8"}, "int8"),
        ({"kv_cache_scheme": SCHEME | {"type": "int"}}, "int8"),
    ],
)
def test_what_is_declared(config, codes):
    declared = read_declared(config)
    assert (None if declared is None else declared.codes) == codes


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"kv_cache_scheme": SCHEME | {"num_bits": 4}}, "kv_cache_scheme.num_bits=4"),
        ({"kv_cache_scheme": SCHEME | {"dynamic": True}}, "kv_cache_scheme.dynamic=True"),
        ({"kv_cache_scheme": SCHEME | {"strategy": "group"}}, "kv_cache_scheme.strategy='group'"),
        ({"kv_cache_scheme": SCHEME | {"symmetric": False}}, "kv_cache_scheme.symmetric=False"),
        ({"kv_cache_scheme": SCHEME | {"type": "complex"}}, "kv_cache_scheme.type='complex'"),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo='NVFP4'"),
    ],
)
def test_what_is_declared_and_not_supported_is_refused_by_name(config, field):
    with pytest.raises(UnsupportedModelError, match=field):
        read_declared(config)


# Relative errors of attention over normal keys and values, whose scales fit the largest.
@pytest.mark.parametrize(
    ("codes", "room", "most"), [("float8_e4m3fn", 2.0, 0.05), ("int8", 1.0, 0.02)]
)
def test_codes_cost_what_their_precision_says(codes, room, most):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(256, 4, 64)), jnp.float32) for _ in range(3))
    largest = 127.0 if codes == "int8" else 448.0

    def attend(k, v):
        scores = jnp.einsum("tnh,cnh->ntc", q, k, precision="highest") / 8
        weights = jnp.exp(scores) / jnp.exp(scores).sum(axis=-1, keepdims=True)
        return np.asarray(jnp.einsum("ntc,cnh->tnh", weights, v, precision="highest"))

    of_keys, of_values = (room * jnp.abs(x).max(axis=(0, 2)) / largest for x in (k, v))
    exact = attend(k, v)
    error = attend(rounded(k, of_keys, codes), rounded(v, of_values, codes)) - exact
    relative = np.linalg.norm(error) / np.linalg.norm(exact)
    assert most / 10 < relative < most
