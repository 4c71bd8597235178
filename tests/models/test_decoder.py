"""The structure of the shared decoder: names, leaves, and how often a layer is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.models.registry import ModelRegistry
from jaxllm.testing import make_tiny_checkpoint


def num_matmuls(model):
    """Of the lowered step; a layer that is lowered once counts once, however often it is called."""
    caches = tuple(
        model._backend.cache_shape(c, num_blocks=16, block_size=4, dtype=jnp.float32)
        for c in model.abstract_model.attention_configs
    )
    tokens, zero = jax.ShapeDtypeStruct((8,), jnp.int32), jnp.int32(0)
    arguments = (model.weights, tokens, jnp.int32(8), zero, caches)
    return jax.jit(model.program.step).lower(*arguments).as_text().count("stablehlo.dot_general")


def parameter_names(model):
    return {
        ".".join(str(key.key) for key in path)
        for path, _ in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model)))
    }


def test_layers_of_equal_structure_are_lowered_once(tmp_path, single_row):
    shallow = single_row(make_tiny_checkpoint(tmp_path / "2", num_hidden_layers=2))
    deep = single_row(make_tiny_checkpoint(tmp_path / "8", num_hidden_layers=8))
    assert num_matmuls(deep) == num_matmuls(shallow)


def test_layers_with_another_window_are_lowered_apart(tmp_path, single_row):
    windows = {"use_sliding_window": True, "sliding_window": 6, "num_hidden_layers": 4}
    alike = single_row(make_tiny_checkpoint(tmp_path / "a", "qwen2", **windows))
    mixed = single_row(
        make_tiny_checkpoint(tmp_path / "b", "qwen2", max_window_layers=2, **windows)
    )
    head = 1
    assert num_matmuls(mixed) - head == 2 * (num_matmuls(alike) - head)


def test_modules_have_vllm_names_and_fused_projections(tmp_path, single_row):
    model = single_row(make_tiny_checkpoint(tmp_path, "qwen3", tie_word_embeddings=False))
    layer = {
        f"model.layers.{i}.{name}.weight"
        for i in range(2)
        for name in [
            "input_layernorm",
            "self_attn.qkv_proj",
            "self_attn.q_norm",
            "self_attn.k_norm",
            "self_attn.o_proj",
            "post_attention_layernorm",
            "mlp.gate_up_proj",
            "mlp.down_proj",
        ]
    }
    others = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert parameter_names(model.abstract_model) == layer | others


@pytest.mark.parametrize(
    ("family", "config", "biased"),
    [
        ("llama", {}, set()),
        ("llama", {"attention_bias": True}, {"qkv_proj", "o_proj"}),
        ("llama", {"mlp_bias": True}, {"gate_up_proj", "down_proj"}),
        ("qwen2", {}, {"qkv_proj"}),
        ("qwen3", {"attention_bias": True}, {"qkv_proj", "o_proj"}),
    ],
)
def test_biases_are_where_the_family_has_them(family, config, biased, tmp_path, single_row):
    model = single_row(make_tiny_checkpoint(tmp_path, family, **config))
    names = parameter_names(model.abstract_model)
    assert {name.split(".")[-2] for name in names if name.endswith(".bias")} == biased


def test_tied_embeddings_are_one_leaf(tmp_path, single_row):
    tied = single_row(make_tiny_checkpoint(tmp_path / "a", tie_word_embeddings=True))
    untied = single_row(make_tiny_checkpoint(tmp_path / "b", tie_word_embeddings=False))
    assert len(jax.tree.leaves(untied.weights)) == len(jax.tree.leaves(tied.weights)) + 1


def test_abstract_model_has_no_arrays(tmp_path):
    from jaxllm.files import read_json
    from jaxllm.models.architecture import read_architecture

    config = read_json(make_tiny_checkpoint(tmp_path) / "config.json")
    # A model of this size exists nowhere; its shapes do.
    huge = read_architecture(config, overrides={"hidden_size": 1 << 18, "vocab_size": 1 << 18})
    model = ModelRegistry.resolve(["LlamaForCausalLM"]).abstract(huge, jnp.bfloat16)
    leaves = jax.tree.leaves(nnx.state(model))
    assert {type(leaf) for leaf in leaves} == {jax.ShapeDtypeStruct}
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}


def test_logits_are_float32_whatever_the_model_is(tmp_path, single_row):
    model = single_row(make_tiny_checkpoint(tmp_path, dtype="bfloat16"), "bfloat16")
    assert model.logits([5, 6, 7]).dtype == np.float32
