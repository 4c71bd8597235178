"""Every tensor and every parameter exactly once, and what is said when they do not fit."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxllm.errors import CheckpointError
from jaxllm.files import read_json
from jaxllm.layers.embedding import pad_tables
from jaxllm.models.architecture import read_architecture
from jaxllm.models.part import split_model
from jaxllm.models.registry import ModelRegistry
from jaxllm.parallel.sharding import make_mesh
from jaxllm.testing import make_tiny_checkpoint
from jaxllm.weights.loader import load_parts, load_weights, weights_bytes

ONE = make_mesh(jax.devices()[:1])


def abstract_model(model_dir, dtype=jnp.float32, part=None, num_shards=1):
    architecture = read_architecture(read_json(model_dir / "config.json"))
    model_class = ModelRegistry.resolve([architecture.name])
    return model_class.abstract(architecture, dtype, num_shards, part)


def load(model_dir, dtype=jnp.float32, num_shards=1, **options):
    model = abstract_model(model_dir, dtype, num_shards=num_shards)
    return nnx.merge(nnx.graphdef(model), load_weights(model_dir, model, **options))


def edit(model_dir, change):
    """Rewrite the tensors of a checkpoint."""
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, model_dir / "model.safetensors")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_parameters_hold_all_of_the_checkpoint(family, tmp_path):
    model_dir = make_tiny_checkpoint(tmp_path, family)
    tensors = load_file(model_dir / "model.safetensors")
    model = load(model_dir)
    assert weights_bytes(model, ONE) == sum(tensor.nbytes for tensor in tensors.values())
    layer, prefix = model.model.layers[1], "model.layers.1"
    np.testing.assert_array_equal(
        layer.self_attn.qkv_proj.weight[...],
        np.concatenate([tensors[f"{prefix}.self_attn.{x}_proj.weight"] for x in "qkv"]),
    )
    np.testing.assert_array_equal(
        layer.mlp.gate_up_proj.weight[...],
        np.concatenate([tensors[f"{prefix}.mlp.{x}_proj.weight"] for x in ["gate", "up"]]),
    )
    np.testing.assert_array_equal(model.model.norm.weight[...], tensors["model.norm.weight"])
    head = "model.embed_tokens" if family.startswith("qwen") else "lm_head"
    identity = jnp.eye(64)
    np.testing.assert_array_equal(model.compute_logits(identity).T, tensors[f"{head}.weight"])


def test_each_of_many_layers_gets_its_own_tensors(tmp_path):
    model_dir = make_tiny_checkpoint(tmp_path, num_hidden_layers=12)
    tensors = load_file(model_dir / "model.safetensors")
    for i, layer in enumerate(load(model_dir).model.layers):
        expected = tensors[f"model.layers.{i}.input_layernorm.weight"]
        np.testing.assert_array_equal(layer.input_layernorm.weight[...], expected)


def test_sharded_checkpoint_loads_as_the_whole(tmp_path):
    whole = make_tiny_checkpoint(tmp_path / "whole")
    sharded = make_tiny_checkpoint(tmp_path / "sharded")
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    # q, k and v of a layer end up in different files.
    weight_map = {name: f"{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        save_file(part, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(load(sharded)), nnx.state(load(whole)))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_weights_are_cast_to_the_dtype_of_the_model(stored, wanted, tmp_path):
    model_dir = make_tiny_checkpoint(tmp_path, dtype=stored)
    weight = load(model_dir, jnp.dtype(wanted)).model.embed_tokens.weight[...]
    assert weight.dtype == wanted
    expected = load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(weight, expected.astype(wanted))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("tied", [False, True])
def test_tables_that_are_looked_up_are_padded(tied, load_format, tmp_path):
    model_dir = make_tiny_checkpoint(
        tmp_path, hidden_size=120, head_dim=16, tie_word_embeddings=tied
    )
    alone = load(model_dir, load_format=load_format)
    padded = abstract_model(model_dir, num_shards=2)
    pad_tables(padded, 128)
    model = nnx.merge(
        nnx.graphdef(padded), load_weights(model_dir, padded, load_format=load_format)
    )
    table, whole = model.model.embed_tokens, alone.model.embed_tokens.weight[...]
    assert table.weight.shape == (512, 128) and whole.shape == (384, 120)
    np.testing.assert_array_equal(table.weight[:384], jnp.pad(whole, ((0, 0), (0, 8))))
    np.testing.assert_array_equal(table(jnp.array([7, 512])), [whole[7], jnp.zeros(120)])
    identity = jnp.eye(120)
    logits = model.compute_logits(identity)[:, :384]
    np.testing.assert_array_equal(logits, alone.compute_logits(identity))
    # A head that looks nothing up has only rows of padding.
    assert tied or model.lm_head.weight.shape == (512, 120)


def test_missing_tensor_is_named(tmp_path):
    model_dir = make_tiny_checkpoint(tmp_path)
    edit(model_dir, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 .*model\.layers\.1\.self_attn\.k_proj"):
        load(model_dir)


def test_extra_tensor_is_named(tmp_path):
    model_dir = make_tiny_checkpoint(tmp_path)
    edit(model_dir, lambda tensors: tensors.update({"model.layers.2.extra": np.zeros(3, "f4")}))
    with pytest.raises(CheckpointError, match=r"1 tensor .*model\.layers\.2\.extra"):
        load(model_dir)


def test_bias_that_the_config_does_not_know_is_refused(tmp_path):
    model_dir = make_tiny_checkpoint(tmp_path, attention_bias=True)
    config = read_json(model_dir / "config.json") | {"attention_bias": False}
    (model_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="8 tensors .*config and weights disagree"):
        load(model_dir)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"intermediate_size": 96}, r"6 shapes.*down_proj.* \(64, 96\).*\(64, 128\)"),
        ({"hidden_size": 32, "head_dim": 16}, r"\(384, 32\).*\(384, 64\)"),
        ({"num_key_value_heads": 4}, r"k_proj.* \(64, 64\).*\(32, 64\)"),
        ({"vocab_size": 512}, r"\(512, 64\).*\(384, 64\)"),
    ],
)
def test_shapes_that_contradict_the_config_are_both_shown(overrides, message, tmp_path):
    model_dir = make_tiny_checkpoint(tmp_path)
    config = read_json(model_dir / "config.json") | overrides
    (model_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"config and weights disagree.*{message}"):
        load(model_dir)


def test_head_of_a_tied_model_may_be_there_if_it_is_the_embedding(tmp_path):
    model_dir = make_tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    edit(model_dir, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    load(model_dir)
    edit(model_dir, lambda t: t["lm_head.weight"].__setitem__((383, 63), 9.0))
    with pytest.raises(CheckpointError, match="'tie_word_embeddings': False"):
        load(model_dir)


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path):
    model_dir = make_tiny_checkpoint(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(model_dir, lambda tensors: tensors.update({name: np.zeros(8, "f4")}))
    load(model_dir)


def test_dummy_weights_need_no_files_and_repeat(tmp_path):
    model_dir = make_tiny_checkpoint(tmp_path, "qwen2")
    (model_dir / "model.safetensors").unlink()
    first, again, other = (
        nnx.state(load(model_dir, load_format="dummy", seed=seed)) for seed in [1, 1, 2]
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
        assert np.ptp(a) > 0 and np.abs(a).max() <= 0.05
        assert not np.array_equal(a, b)


def load_in_parts(model_dir, **options):
    """The parameters of all parts, by name."""
    models = [abstract_model(model_dir, part=part) for part in split_model(5, 3)]
    states = load_parts(model_dir, [(model, ONE) for model in models], **options)
    return [dict(nnx.to_flat_state(state)) for state in states]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_parts_hold_what_the_whole_holds(is_tied, load_format, tmp_path):
    options = {"num_hidden_layers": 5, "tie_word_embeddings": is_tied}
    model_dir = make_tiny_checkpoint(tmp_path, "qwen3", **options)
    whole = dict(nnx.to_flat_state(nnx.state(load(model_dir, load_format=load_format))))
    parts = load_in_parts(model_dir, load_format=load_format)
    assert {name for part in parts for name in part} == set(whole)
    for part in parts:
        for name, leaf in part.items():
            np.testing.assert_array_equal(leaf[...], whole[name][...])


def test_parts_together_miss_and_leave_nothing(tmp_path):
    model_dir = make_tiny_checkpoint(tmp_path, "qwen3", num_hidden_layers=5)
    name = "model.layers.3.mlp.up_proj.weight"
    edit(model_dir, lambda tensors: tensors.update({name + "_scale": np.zeros(8, "f4")}))
    with pytest.raises(CheckpointError, match=f"no place for: {name}_scale"):
        load_in_parts(model_dir)
    edit(model_dir, lambda tensors: [tensors.pop(name + "_scale"), tensors.pop(name)])
    with pytest.raises(CheckpointError, match=f"lacks 1 .*{name}"):
        load_in_parts(model_dir)


def test_weights_bytes_follow_the_dtype(tmp_path):
    model_dir = make_tiny_checkpoint(tmp_path)
    in_float32 = weights_bytes(abstract_model(model_dir), ONE)
    assert in_float32 == 2 * weights_bytes(abstract_model(model_dir, jnp.bfloat16), ONE)
