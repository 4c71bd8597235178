"""What Gemma 4 has beyond others: layers that share, sizes by layer, what is refused."""

import jax
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.models.architecture import read_architecture
from jaxllm.testing import make_tiny_checkpoint, tiny_config
from tests.models.conftest import assert_same_model

SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL]
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}


def read(**fields):
    given = {"num_hidden_layers": 6, "layer_types": KINDS, "num_kv_shared_layers": 3}
    return read_architecture(tiny_config("gemma4") | {"dtype": "float32"} | given | fields)


def test_layers_share_with_the_last_of_their_type_that_has_keys_and_values():
    layers = read().layers
    assert [layer.caches_of for layer in layers] == [None, None, None, 1, 1, 2]
    kinds = [attention.kv for layer in layers for attention in layer.mixers]
    assert kinds == ["own", "lent", "lent", "borrowed", "borrowed", "borrowed"]
    assert [mlp.intermediate_size for layer in layers for mlp in layer.ffns] == 3 * [96] + 3 * [192]


def test_sizes_are_those_of_the_type_or_of_the_layer():
    def sizes(**fields):
        arch = read(num_kv_shared_layers=0, **fields)
        heads = [attention for layer in arch.layers for attention in layer.mixers]
        return [(attention.num_kv_heads, attention.head_size) for attention in heads]

    assert sizes() == 2 * [(2, 16), (2, 16), (2, 32)]
    # It counts only where values are keys.
    assert sizes(num_global_key_value_heads=1) == sizes()
    values_are_keys = {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
    assert sizes(**values_are_keys) == 2 * [(2, 16), (2, 16), (1, 32)]
    # As transformers writes it for models with ten layers or more.
    by_layer = {"02": {"head_dim": 48}, "05": {"head_dim": 24, "num_key_value_heads": 4}}
    assert sizes(per_layer_config=by_layer)[2:] == [(2, 48), (2, 16), (2, 16), (4, 24)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            EXPERTS | {"hidden_activation": "gelu"},
            "hidden_activation .?gelu.? is not supported for experts",
        ),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'.*before it"),
        ({"per_layer_config": {"2": {"hidden_size": 9}}}, "per_layer_config with hidden_size"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers=4 of 6 .* type full_attention"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers=7 of 6 .* sliding_attention"),
        ({"per_layer_config": {"5": {"head_dim": 32}}}, "layer 5 .* layer 2.* 2 kv heads of 32"),
        ({"per_layer_config": {"full": {}}}, "per_layer_config=.* must map indices"),
        ({"vocab_size_per_layer_input": 300}, "300 is less than vocab_size=384"),
    ],
)
def test_what_contradicts_itself_is_refused(fields, message):
    with pytest.raises(CheckpointError, match=message):
        read(**fields)


def test_keys_and_values_that_no_layer_uses_are_left_in_the_checkpoint(tmp_path, single_row):
    model_dir = make_tiny_checkpoint(tmp_path, "gemma4")
    expected = single_row(model_dir)
    tensors = load_file(model_dir / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        name = f"model.layers.{{}}.self_attn.{name}.weight"
        assert name.format(6) not in tensors
        tensors[name.format(6)] = tensors[name.format(4)]
    save_file(tensors, model_dir / "model.safetensors")
    assert_same_model(single_row(model_dir), expected)
    # Those of another layer are refused.
    tensors["model.layers.5.self_attn.v_norm.weight"] = tensors["model.layers.4.layer_scalar"]
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.5\.self_attn\.v_norm"):
        single_row(model_dir)


def test_layers_of_equal_structure_that_share_are_traced_once(tmp_path, single_row):
    model = single_row(
        make_tiny_checkpoint(
            tmp_path, "gemma4", num_hidden_layers=6, layer_types=KINDS, num_kv_shared_layers=3
        )
    )
    graphdefs = {nnx.split(layer)[0] for layer in model.abstract_model.model.layers}
    # A window alone, a window or all lent, a window or all borrowed.
    assert len(graphdefs) == 5
    assert len(jax.tree.leaves(model.abstract_model.attention_configs)) == 3
