"""Whole steps of models with latent attention, of two layers, for TPU chips that are not there."""

import importlib.util
import json
import re

import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.hlo import collectives, whole_array_copies
from jaxllm.programs.summary import summary
from jaxllm.testing import tiny_config

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="no libtpu: nothing is compiled for TPUs (pip install '.[tpu]')",
    ),
]

# One dense layer and one of experts. Attention and hidden sizes are those of the models; there are
# fewer experts and tokens of the vocabulary, which the attention does not see.
FEWER = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "vocab_size": 32_000,
    "n_routed_experts": 16,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = FEWER | {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
GLM_4_7_FLASH = FEWER | {
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
}


def sweep(*values):
    """A step that others cover together."""
    return pytest.param(*values, marks=pytest.mark.sweep)


@pytest.mark.parametrize(
    ("family", "sizes", "slice_name", "num_shards", "decodes"),
    [
        sweep("glm4_moe_lite", GLM_4_7_FLASH, "v7x-8", 1, True),
        ("deepseek_v3", DEEPSEEK_V3, "v6e-8", 8, True),
        sweep("glm4_moe_lite", GLM_4_7_FLASH, "v5e-1", 1, False),
        sweep("glm4_moe_lite", GLM_4_7_FLASH, "v6e-1", 1, False),
        sweep("glm4_moe_lite", GLM_4_7_FLASH, "v7x-8", 4, False),
        sweep("deepseek_v3", DEEPSEEK_V3, "v6e-8", 8, False),
        sweep("deepseek_v3", DEEPSEEK_V3, "v7x-8", 8, False),
        sweep("deepseek_v3", DEEPSEEK_V3, "v5e-8", 8, True),
    ],
)
def test_a_step_copies_no_latents_and_exchanges_none(
    family, sizes, slice_name, num_shards, decodes, tmp_path
):
    # Not the size of anything else, so that no activation has the shape of a weight.
    hlo = compile_step(family, sizes, slice_name, num_shards, decodes, 160, tmp_path)
    assert "ragged_self_attention" not in hlo


@pytest.mark.parametrize(
    ("family", "sizes", "slice_name", "num_shards"),
    [
        ("deepseek_v3", DEEPSEEK_V3, "v6e-8", 8),
        sweep("deepseek_v3", DEEPSEEK_V3, "v7x-8", 8),
        sweep("deepseek_v3", DEEPSEEK_V3, "v5e-8", 8),
        sweep("glm4_moe_lite", GLM_4_7_FLASH, "v6e-1", 1),
        sweep("glm4_moe_lite", GLM_4_7_FLASH, "v5e-1", 1),
        sweep("glm4_moe_lite", GLM_4_7_FLASH, "v7x-8", 4),
    ],
)
def test_a_step_with_whole_prompts_copies_no_latents(
    family, sizes, slice_name, num_shards, tmp_path
):
    hlo = compile_step(family, sizes, slice_name, num_shards, False, 1184, tmp_path, max_num_seqs=8)
    # A call for each layer, in a conditional. With more rows, short ones would be moved 128 tokens
    # at a time, which have the shape of the matrices of 16 heads.
    assert len(re.findall(r"%ragged_self_attention\S* = ", hlo)) == 2
    assert len(re.findall(r" conditional\(", hlo)) >= 2


def compile_step(
    family, sizes, slice_name, num_shards, decodes, num_tokens, tmp_path, *, max_num_seqs=32
):
    """Compile the largest step, of decodes or a mixed one, and return its HLO."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(family) | sizes))
    args = EngineArgs(
        model=str(tmp_path),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=num_tokens,
        max_model_len=8192,
        # Caches must not fit into a TPU's VMEM: XLA would move them there and back.
        num_gpu_blocks_override=8003,
        tensor_parallel_size=num_shards,
    )
    plan = make_plan(args, topology_devices(slice_name)[:num_shards])
    assert "latent attention 'tpu'" in summary(plan)
    bucket = max(bucket for bucket in plan.buckets if bucket.decode_only == decodes)
    program = declare_programs(plan, make_packer(plan).layouts)[bucket]
    compiled = program.compile(program.lower())
    weights, state, _ = program.arguments
    hlo = compiled.as_text()
    assert not whole_array_copies(hlo, [*weights, *state.caches])
    assert compiled.memory_analysis().alias_size_in_bytes >= plan.kv_cache_bytes
    # Every device has all latents, and writes those of a step itself.
    assert all(c.num_bytes < plan.kv_cache_bytes // 2 for c in collectives(hlo))
    return hlo
