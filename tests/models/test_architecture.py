"""What is read from a config.json, and what is refused, by name."""

import pytest

from jaxllm.errors import CheckpointError, UnsupportedModelError, ValidationError
from jaxllm.layers.attention import QKNorm
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
)
from jaxllm.models.architecture import read_architecture
from jaxllm.models.hf_config import merge_overrides
from jaxllm.testing import tiny_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def read(name="Llama", **fields):
    named = {"architectures": [f"{name}ForCausalLM"]}
    if name != "Llama":  # by default it has as many kv heads as heads, others do not
        named["num_key_value_heads"] = 4
    return read_architecture(LLAMA | named | fields)


def attentions(arch):
    """That of each layer."""
    return [attention for layer in arch.layers for attention in layer.mixers]


def rope_of(arch):
    (rope,) = {attention.rope for attention in attentions(arch)}
    return rope


def test_defaults_of_old_llama_configs():
    arch = read()
    assert len(arch.layers) == 3 and len(set(arch.layers)) == 1
    (attention,), (mlp,) = arch.layers[0].mixers, arch.layers[0].ffns
    assert (attention.num_kv_heads, attention.head_size, attention.scale) == (4, 16, 0.25)
    assert attention.rope == RopeConfig(size=16, theta=10_000.0)
    assert attention.window is None and attention.qk_norm is None
    assert not (attention.qkv_bias or attention.o_bias or mlp.bias or arch.tie_word_embeddings)
    assert (arch.dtype, arch.max_model_len, arch.eos_token_ids) == ("float32", 512, ())


def test_architecture_is_hashable_and_equal_for_equal_configs():
    assert hash(read()) == hash(read())
    assert read() == read() != read(rms_norm_eps=1e-5)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [({"dtype": "bfloat16"}, "bfloat16"), ({"torch_dtype": "float16"}, "float16")],
)
def test_dtype_under_its_new_and_old_name(fields, dtype):
    assert read(**fields).dtype == dtype


def test_eos_token_ids_may_be_one_or_many():
    assert read(eos_token_id=2).eos_token_ids == (2,)
    assert read(eos_token_id=[2, 7]).eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("name", "fields", "windows"),
    [
        ("Mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("Mistral", {"sliding_window": None}, (None, None, None)),
        ("Mistral", {}, (4096, 4096, 4096)),
        ("Qwen2", {"sliding_window": 8}, (None, None, None)),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            (None, 8, 8),
        ),
        (
            "Qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
        ("Qwen3", {"layer_types": ["full_attention"] * 3}, (None, None, None)),
    ],
)
def test_windows_of_the_families(name, fields, windows):
    architecture = read(name, max_position_embeddings=8192, **fields)
    assert tuple(attention.window for attention in attentions(architecture)) == windows


def test_a_window_of_the_longest_sequence_is_none():
    config = LLAMA | {
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 512,
        "num_key_value_heads": 4,
    }

    def window(max_model_len=None):
        return attentions(read_architecture(config, max_model_len=max_model_len))[0].window

    assert window() is None and window(100) is None
    assert attentions(read_architecture(config | {"sliding_window": 511}))[0].window == 511
    chunked = read_architecture(tiny_config("llama4"), max_model_len=16)
    assert {attention.chunk for attention in attentions(chunked)} == {None}
    chunked = read_architecture(tiny_config("llama4"), max_model_len=17)
    assert {attention.chunk for attention in attentions(chunked)} == {16, None}


def test_qwen3_has_qk_norm_and_its_own_head_size():
    attention = attentions(read("Qwen3", rms_norm_eps=1e-5))[0]
    assert attention.qk_norm == QKNorm(norm=RMSNormSpec(eps=1e-5)) and attention.head_size == 128


@pytest.mark.parametrize(
    ("rope", "scaling", "max_model_len"),
    [
        ({"rope_type": "default"}, None, 512),
        ({"rope_type": "linear", "factor": 4}, LinearScaling(factor=4.0), 2048),
        ({"type": "linear", "factor": 4}, LinearScaling(factor=4.0), 2048),
        (
            {"rope_type": "dynamic", "factor": 2.0},
            DynamicScaling(factor=2.0, original_max_len=512),
            1024,
        ),
        (
            {
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 128,
            },
            Llama3Scaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=128
            ),
            512,
        ),
        (
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 256},
            YarnScaling(
                factor=4.0,
                original_max_len=256,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=True,
                attention_factor=pytest.approx(1.1386294),
            ),
            1024,
        ),
    ],
)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_in_the_old_and_new_notation(field, rope, scaling, max_model_len):
    arch = read(**{field: rope, "rope_theta": 500.0})
    assert rope_of(arch).scaling == scaling
    assert rope_of(arch).theta == 500.0
    assert arch.max_model_len == max_model_len


def test_rope_scaling_may_call_its_kind_type_beside_rope_parameters():
    arch = read(
        rope_parameters={"rope_type": "default", "rope_theta": 77.0},
        rope_scaling={"type": "linear", "factor": 2.0},
    )
    assert (rope_of(arch).theta, rope_of(arch).scaling) == (77.0, LinearScaling(factor=2.0))


def test_an_object_that_names_two_kinds_of_rope_is_refused():
    with pytest.raises(CheckpointError, match="type='linear', which contradicts rope_type"):
        read_architecture(
            LLAMA | {"rope_scaling": {"rope_type": "default"}},
            overrides={"rope_scaling": {"type": "linear", "factor": 2.0}},
        )


def test_theta_inside_rope_parameters():
    arch = read(rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    assert rope_of(arch).theta == 77.0


def test_contradicting_thetas_are_refused():
    with pytest.raises(CheckpointError, match=r"rope_theta=5\.0 contradicts"):
        read(rope_theta=5.0, rope_parameters={"rope_type": "default", "rope_theta": 77.0})


def test_yarn_without_factor_takes_the_ratio_of_lengths():
    arch = read(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 128})
    scaling = rope_of(arch).scaling
    assert isinstance(scaling, YarnScaling) and scaling.factor == 4.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["FooForCausalLM"]}, "FooForCausalLM.*supported are .*LlamaForCausalLM"),
        ({"architectures": None}, "names none.*LlamaForCausalLM"),
        ({"hidden_act": "mish"}, "hidden_act 'mish'.*supported are silu"),
        ({"sliding_window": 8}, r"sliding_window=8.*hf_overrides=\{'sliding_window': None\}"),
        ({"sliding_window": 8, "alibi": True}, r"sliding_window=8.*\(alibi likewise\)"),
        ({"is_causal": False}, "is_causal=False is not supported"),
        ({"rope_scaling": {"rope_type": "axial"}}, "'axial'.*default, linear, dynamic"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1.0}}, "alpha"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq.*unquantised"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn.*supported are float32"),
    ],
)
def test_what_cannot_run_is_refused_by_name_with_what_can(fields, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size='64' must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4.*num_key_value_heads=3"),
        ({"hidden_size": 66}, "hidden_size=66.*num_attention_heads=4"),
        ({"attention_bias": "yes"}, "attention_bias='yes'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x'"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None"),
        ({"quantization_config": "awq"}, "quantization_config='awq' must be an object"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' must be an object"),
        ({"rope_parameters": 5}, "rope_parameters=5"),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM' must be a list"),
        ({"architectures": [5]}, "architectures="),
    ],
)
def test_broken_configs_say_which_field(fields, message):
    with pytest.raises(CheckpointError, match=message):
        read(**fields)


@pytest.mark.parametrize(
    ("num_shards", "message"),
    [
        (3, "tensor_parallel_size=3: .* not divide the model's num_attention_heads=8"),
        (8, "tensor_parallel_size=8: .* not divide the model's intermediate_size=12"),
        (4, "tensor_parallel_size=4: .* nor a multiple of the model's num_key_value_heads=6"),
    ],
)
def test_sizes_that_cannot_be_cut_are_refused(num_shards, message):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 12}
    if num_shards == 4:
        heads |= {"num_attention_heads": 12, "num_key_value_heads": 6}
    with pytest.raises(ValidationError, match=message):
        read(head_dim=4, **heads).check(num_shards)


def test_qwen_layer_types_must_fit_the_rest():
    kinds = ["sliding_attention", "full_attention"]
    with pytest.raises(CheckpointError, match="layer_types=5 must be a list"):
        read("Qwen2", layer_types=5)
    with pytest.raises(CheckpointError, match="2 entries for num_hidden_layers=3"):
        read("Qwen2", layer_types=kinds)
    with pytest.raises(CheckpointError, match="use_sliding_window"):
        read("Qwen2", layer_types=[*kinds, "full_attention"])
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        read("Qwen2", layer_types=[*kinds, "chunked_attention"])


def test_overrides_merge_objects_and_replace_the_rest():
    config = {"a": 1, "rope": {"x": 1, "y": 2}}
    assert merge_overrides(config, {"a": 2, "rope": {"y": 3}}) == {"a": 2, "rope": {"x": 1, "y": 3}}
    assert config == {"a": 1, "rope": {"x": 1, "y": 2}}


def test_overrides_reach_the_architecture():
    overrides = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    config = LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 99.0}}
    arch = read_architecture(config, overrides=overrides)
    assert rope_of(arch) == RopeConfig(size=16, theta=99.0, scaling=LinearScaling(factor=2.0))


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "vocab_size", "head_dim"])
@pytest.mark.parametrize("value", [10**9, 10**12, 10**4000])
def test_sizes_are_bounded_before_anything_is_made_of_them(field, value):
    with pytest.raises(CheckpointError, match=f"{field}=1000.*too large; at most [0-9]+ is"):
        read(**{field: value})
    with pytest.raises(CheckpointError, match=f"{field}=1000.*too large; at most [0-9]+ is"):
        read_architecture(LLAMA, overrides={field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 4096, "head_dim": 4096}, "num_attention_heads times head_dim is"),
        ({"vocab_size": 1 << 24, "hidden_size": 1 << 18}, "vocab_size times hidden_size is"),
        ({"intermediate_size": 1 << 22, "hidden_size": 1 << 18}, "intermediate_size times hidden"),
        ({"max_position_embeddings": 1 << 31}, "max_position_embeddings=2147483648 is too large"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000.* is too large"),
        ({"rope_theta": 10**400}, "rope_theta=1000.*must be at least"),
        ({"rope_theta": float("nan")}, "rope_theta=nan must be above zero"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e9}}, "sequences of 512000000000"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e-5}}, "sequences of 0 tokens"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e300}}, "factor=1e[+]300 must be"),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 1e-9}},
            "original_max_position_embeddings=1e-09 must be at least 2",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 2,
                    "mscale": "a",
                    "mscale_all_dim": 1,
                }
            },
            "mscale='a' must be above zero",
        ),
        ({"eos_token_id": list(range(10**5))}, "eos_token_id has 100000 token ids; at most"),
        ({"eos_token_id": ["x" * 10**6]}, "eos_token_id=.{0,90} must be a token id"),
        ({"dtype": "x" * 10**6}, "dtype x{80} of"),
        ({"architectures": "x" * 10**6}, "architectures=.{0,90} must be"),
    ],
)
def test_what_would_explode_is_refused_in_one_short_line(fields, message):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as caught:
        read(**fields)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("kinds", [["full_attention"] * 10**5, 7, [7], "full_attention"])
def test_layer_types_are_one_for_each_layer(family, kinds):
    with pytest.raises(CheckpointError, match="layer_types"):
        read(family, layer_types=kinds, sliding_window=None)
