"""Whole steps of models with experts, cut over TPU chips that are not there."""

import importlib.util
import json

import pytest
from jaxllm_kernels.common import round_up
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.compile import Programs
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.hlo import collectives, whole_array_copies
from jaxllm.testing import tiny_config

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="no libtpu: nothing is compiled for TPUs (pip install '.[tpu]')",
    ),
]

QWEN3_30B_A3B = tiny_config("qwen3_moe") | {
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
GPT_OSS_20B = tiny_config("gpt_oss") | {
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}
# Latent attention, and a shared MLP beside the experts.
DEEPSEEK_V3 = tiny_config("deepseek_v3") | {
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "topk_group": 4,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
# As they are released: experts in MXFP4, and codes of fp8 with a scale for each block.
GPT_OSS_120B = GPT_OSS_20B | {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
}
DEEPSEEK_V3_FP8 = DEEPSEEK_V3 | {
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
TWO_LAYERS = {"num_hidden_layers": 2, "first_k_dense_replace": 1}


def two_of(config):
    return config | {name: count for name, count in TWO_LAYERS.items() if name in config}


def sweep(*values):
    """A step that others cover together, or one of a whole model."""
    return pytest.param(*values, marks=pytest.mark.sweep)


@pytest.mark.parametrize(
    ("config", "slice_name", "whole", "decodes"),
    [
        (two_of(QWEN3_30B_A3B), "v6e-8", True, True),
        sweep(two_of(QWEN3_30B_A3B), "v6e-8", True, False),
        # Of each expert a device has 96 intermediate values.
        sweep(two_of(QWEN3_30B_A3B), "v6e-8", False, True),
        sweep(two_of(QWEN3_30B_A3B), "v7x-8", True, True),
        sweep(two_of(QWEN3_30B_A3B), "v5e-8", True, False),
        sweep(two_of(GPT_OSS_20B), "v6e-8", True, True),
        sweep(two_of(DEEPSEEK_V3), "v6e-16", True, True),
        sweep(two_of(DEEPSEEK_V3_FP8), "v7x-8", True, True),
        sweep(two_of(GPT_OSS_120B), "v7x-8", True, True),
        sweep(QWEN3_30B_A3B, "v6e-8", True, True),
        sweep(GPT_OSS_20B, "v6e-8", True, True),
        sweep(two_of(DEEPSEEK_V3), "v6e-64", True, True),
    ],
)
def test_a_layers_experts_exchange_one_sum_and_copy_no_weights(
    config, slice_name, whole, decodes, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    num_shards = int(slice_name.partition("-")[2])
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
    of_codes = {how.partition(" of experts: ")[2] for how in plan.coded_products} - {""}
    of_experts = of_codes if plan.experts is None else {repr(plan.experts.name)}
    assert of_experts == {"'tpu'"}
    declared = declare_programs(plan, make_packer(plan).layouts)
    bucket = max(bucket for bucket in plan.buckets if bucket.decode_only == decodes)
    compiled = Programs(declared)[bucket]
    weights, state, _ = declared[bucket].arguments
    hlo, hidden_size = compiled.as_text(), config["hidden_size"]
    copies = whole_array_copies(hlo, [*weights, *state.caches])
    assert not copies
    # Of the activations: the embedding's, and one of the attention and one of the ffns of each
    # layer, that of a shared MLP among them. The sampler exchanges parts of other sizes. Rows of
    # the embedding are padded, so that XLA does not keep it by columns.
    of_row = bucket.num_tokens * 2
    sizes = {of_row * hidden_size, of_row * round_up(hidden_size, 128)}
    of_rows = [c for c in collectives(hlo) if c.num_bytes in sizes]
    num_layers = config["num_hidden_layers"]
    assert [c.opcode for c in of_rows] == ["all-reduce"] * (2 * num_layers + 1)
    num_kernels = num_layers + len(plan.architecture.num_experts)
    assert hlo.count('custom_call_target="tpu_custom_call"') >= num_kernels
    # Some rows of activations, and of logits in float32.
    rows = bucket.num_tokens * hidden_size * 64 + plan.max_num_seqs * config["vocab_size"] * 4
    temp_bytes = compiled.memory_analysis().temp_size_in_bytes
    assert temp_bytes < rows
