"""Whole steps of models with experts, cut over TPU chips that are not there."""

import importlib.util
import json

import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.compile import Programs
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.hlo import collectives, whole_array_copies

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="no libtpu: nothing is compiled for TPUs (pip install '.[tpu]')",
    ),
]

HIDDEN_SIZE, NUM_LAYERS = 2048, 2
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("slice_name", "num_shards", "whole", "decodes"),
    [
        ("v6e-8", 8, True, True),
        pytest.param("v6e-8", 8, True, False, marks=pytest.mark.sweep),
        # Of each expert a device has 96 intermediate values.
        pytest.param("v6e-8", 8, False, True, marks=pytest.mark.sweep),
        pytest.param("v7x-8", 8, True, True, marks=pytest.mark.sweep),
        pytest.param("v5e-8", 8, True, False, marks=pytest.mark.sweep),
    ],
)
def test_a_layers_experts_exchange_one_sum_and_copy_no_weights(
    slice_name, num_shards, whole, decodes, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    args = EngineArgs(
        model=str(tmp_path),
        max_num_seqs=64,
        # As many as no device's part of a weight has rows.
        max_num_batched_tokens=1024,
        max_model_len=4096,
        tensor_parallel_size=num_shards,
        enable_expert_parallel=whole,
    )
    plan = make_plan(args, topology_devices(slice_name)[:num_shards])
    assert plan.experts is not None and plan.experts.name == "tpu"
    declared = declare_programs(plan, make_packer(plan).layouts)
    bucket = max(bucket for bucket in plan.buckets if bucket.decode_only == decodes)
    compiled = Programs(declared)[bucket]
    weights, state, _ = declared[bucket].arguments
    hlo = compiled.as_text()
    assert not whole_array_copies(hlo, [*weights, *state.caches])
    # Of the activations: the embedding's, and one of the attention and one of the experts of each
    # layer. The sampler exchanges parts of other sizes.
    of_rows = [c for c in collectives(hlo) if c.num_bytes == bucket.num_tokens * HIDDEN_SIZE * 2]
    assert [c.opcode for c in of_rows] == ["all-reduce"] * (2 * NUM_LAYERS + 1)
    assert hlo.count('custom_call_target="tpu_custom_call"') >= 2 * NUM_LAYERS
    # Some rows of activations, and of logits in float32.
    rows = bucket.num_tokens * HIDDEN_SIZE * 64 + plan.max_num_seqs * 151936 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < rows
