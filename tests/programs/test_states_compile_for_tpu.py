"""Whole steps of models with the gated delta rule, for TPU chips that are not there."""

import importlib.util
import json

import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.hlo import copies
from jaxllm.programs.summary import summary
from jaxllm.testing import tiny_config

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="no libtpu: nothing is compiled for TPUs (pip install '.[tpu]')",
    ),
]

QWEN3_5 = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "vocab_size": 32_000,
    "torch_dtype": "bfloat16",
}


# The kernel alone is compiled always.
@pytest.mark.sweep
@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("num_shards", [1, 4])
def test_a_step_copies_no_states(num_shards, decodes, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3_5") | QWEN3_5))
    args = EngineArgs(
        model=str(tmp_path),
        max_num_seqs=96,
        max_num_batched_tokens=160,
        max_model_len=2048,
        num_gpu_blocks_override=4003,
        tensor_parallel_size=num_shards,
    )
    plan = make_plan(args, topology_devices("v6e-8")[:num_shards])
    assert "recurrent layers 'xla' and 'tpu'" in summary(plan)
    bucket = max(bucket for bucket in plan.buckets if bucket.decode_only == decodes)
    program = declare_programs(plan, make_packer(plan).layouts)[bucket]
    hlo = program.compile(program.lower()).as_text()
    assert hlo is not None and "delta_decode" in hlo
    matrices = (96, 32 // num_shards, 128, 128)
    assert not [copy for copy in copies(hlo) if tuple(copy.shape) == matrices]
