"""What families have and Llama has not, of real width, compiled for chips that are not there.

One made-up model has layers of several families, since what a layer compiles to does not depend on
its neighbours. Gemma 4 is a model of its own: layers share caches, and have inputs of their own.
"""

import dataclasses
import importlib.util
import json

import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.models.architecture import read_architecture
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import Family
from jaxllm.models.registry import ModelRegistry
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.hlo import collectives, whole_array_copies
from jaxllm.testing import tiny_config

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="no libtpu: nothing is compiled for TPUs (pip install '.[tpu]')",
)
needs_cuda_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="no CUDA plugin of JAX: nothing is compiled for GPUs (see README)",
)

SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
# Family, fields, and which layers of the model that they describe.
LAYERS = (
    # A parallel block with a LayerNorm; a window in one layer, no positions in the other.
    ("cohere2", {"head_dim": 128, "sliding_window": 1024, "layer_types": [SLIDING, FULL]}, 2),
    # Norms of all queries and of all keys, and norms behind the mixer and the MLP.
    ("olmo3", {"head_dim": 128, "layer_types": [FULL]}, 1),
    # Heads rotated in part, norms of queries and keys with biases, biases, an MLP of two matrices.
    ("phi", {"qk_layernorm": True}, 1),
    # A temperature of queries by their positions.
    ("mistral3", {"head_dim": 128, "max_position_embeddings": 8192}, 1),
    # Scores with a soft cap, heads of 256, sandwiches of norms, the same window.
    ("gemma2", {"head_dim": 256, "sliding_window": 1024, "layer_types": [SLIDING]}, 1),
)
GEMMA4_SIZES = SIZES | {
    "num_hidden_layers": 4,
    "layer_types": 2 * [SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "attention_k_eq_v": True,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 2,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 32_000,
}

DEEPSEEK_SIZES = SIZES | {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "num_key_value_heads": 16,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    # Not 128, the tokens of a tile: queries of a tile would have the shape of a weight.
    "qk_nope_head_dim": 160,
    "qk_rope_head_dim": 64,
    "v_head_dim": 160,
    "moe_intermediate_size": 896,
    "n_routed_experts": 16,
}


def read_mixture(name, config):
    """The layers of several families, with learned positions, a soft cap of logits and a bias."""
    layers = []
    for family, fields, num_layers in LAYERS:
        fields = tiny_config(family) | SIZES | {"num_hidden_layers": num_layers} | fields
        read = read_architecture(fields)
        layers += read.layers
    return dataclasses.replace(
        read,
        name=name,
        layers=tuple(layers),
        final_norm=layers[0].norm,
        tie_word_embeddings=False,
        num_positions=8192,
        logits_soft_cap=30.0,
        has_head_bias=True,
        max_model_len=8192,
        hf_config=config.fields,
    )


@pytest.fixture
def make_model(tmp_path, monkeypatch):
    """Makes a directory with the config.json of a model, without weights."""
    for table in ("_classes", "_families"):
        monkeypatch.setattr(ModelRegistry, table, dict(getattr(ModelRegistry, table)))
    family = Family(read=read_mixture, checkpoint=lambda architecture: LLAMA_NAMES, tiny={})
    ModelRegistry.register_model("Mixture", family=family)
    configs = {
        "mixture": {"architectures": ["Mixture"]},
        "gemma4": tiny_config("gemma4") | GEMMA4_SIZES,
        "deepseek_v3": tiny_config("deepseek_v3") | DEEPSEEK_SIZES,
    }

    def make_model(name, **fields):
        (tmp_path / "config.json").write_text(json.dumps(configs[name] | fields))
        return str(tmp_path)

    return make_model


def compile_largest(model_dir, device, windows=(None, 1024), decode_only=False):
    """Compile the largest step of a model, which has decodes and chunks, or decodes alone. No array
    of the shape of a weight or cache is copied, and the caches are updated in place. Return the
    plan."""
    args = EngineArgs(
        model=model_dir,
        max_num_seqs=32,
        # Not the size of anything else, so that no activation has the shape of a weight.
        max_num_batched_tokens=192,
        max_model_len=8192,
        # Caches with windows must not fit into a TPU's VMEM: XLA would move them there and back.
        num_gpu_blocks_override=8003,
    )
    plan = make_plan(args, [device])
    assert tuple(group.window for group in plan.cache_groups) == windows
    bucket = max(bucket for bucket in plan.buckets if bucket.decode_only == decode_only)
    program = declare_programs(plan, make_packer(plan).layouts)[bucket]
    compiled = program.compile(program.lower())
    weights, state, _ = program.arguments
    hlo = compiled.as_text()
    assert not whole_array_copies(hlo, [*weights, *state.caches])
    assert not collectives(hlo)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= plan.kv_cache_bytes
    counted = plan.weights_bytes + plan.kv_cache_bytes
    assert memory.argument_size_in_bytes == pytest.approx(counted, rel=0.02)
    return plan


# Those that take longest are compiled only when asked for.
GEMMA4 = pytest.param("gemma4", marks=pytest.mark.sweep)


@pytest.mark.sweep
@pytest.mark.tpu_compile
@needs_libtpu
@pytest.mark.parametrize("name", ["mixture", "gemma4"])
@pytest.mark.parametrize("slice_name", ["v5e-1", "v6e-1", "v7x-8"])
def test_a_step_for_tpus(slice_name, name, make_model):
    plan = compile_largest(make_model(name), topology_devices(slice_name)[0])
    assert plan.attention.name == "tpu"


@pytest.mark.sweep
@pytest.mark.tpu_compile
@needs_libtpu
def test_a_step_with_latents_for_tpus(make_model):
    plan = compile_largest(make_model("deepseek_v3"), topology_devices("v6e-1")[0], (None,))
    assert plan.attention.name == "tpu"


@pytest.mark.gpu_compile
@needs_cuda_plugin
@pytest.mark.parametrize("decode_only", [pytest.param(True, marks=pytest.mark.sweep), False])
def test_a_step_with_latents_for_an_h200(decode_only, make_model):
    model, (device,) = make_model("deepseek_v3"), topology_devices("h200")
    plan = compile_largest(model, device, (None,), decode_only)
    assert plan.attention.name == "mosaic_sm90"


@pytest.mark.gpu_compile
@needs_cuda_plugin
@pytest.mark.parametrize("name", ["mixture", GEMMA4])
def test_a_step_for_an_h200(name, make_model):
    model = make_model(name, **({"global_head_dim": 256} if name == "gemma4" else {}))
    plan = compile_largest(model, *topology_devices("h200"))
    assert plan.attention.name == "mosaic_sm90"


@pytest.mark.gpu_compile
@needs_cuda_plugin
def test_heads_of_512_have_no_kernel_for_an_h200(make_model):
    args = EngineArgs(model=make_model("gemma4"), num_gpu_blocks_override=8003)
    assert make_plan(args, topology_devices("h200")).attention.name == "xla"
