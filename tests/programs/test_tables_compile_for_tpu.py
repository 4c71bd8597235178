"""Tables that are looked up, of sizes that no vector register divides, compiled for TPUs."""

import importlib.util
import json

import jax
import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.parallel.sharding import device_bytes
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.hlo import whole_array_copies
from jaxllm.testing import tiny_config

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="no libtpu: nothing is compiled for TPUs (pip install '.[tpu]')",
    ),
]

# The smallest models that the field serves, and gpt-oss.
SMALL, MIDDLE, GPT_OSS = (49_152, 576), (49_152, 960), (201_088, 2880)


def compile_decode(tmp_path, slice_name, **fields):
    """Compile a decode step of one layer. Return the plan, and what it compiled to."""
    sizes = {"num_hidden_layers": 1, "head_dim": 128, "torch_dtype": "bfloat16"}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    config = tiny_config("llama") | sizes | heads | {"intermediate_size": 2048} | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    num_shards = int(slice_name.partition("-")[2])
    args = EngineArgs(
        model=str(tmp_path),
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_model_len=1024,
        num_gpu_blocks_override=64,
        tensor_parallel_size=num_shards,
    )
    plan = make_plan(args, topology_devices(slice_name)[:num_shards])
    bucket = max(bucket for bucket in plan.buckets if bucket.decode_only)
    program = declare_programs(plan, make_packer(plan).layouts)[bucket]
    return plan, program, program.compile(program.lower())


CASES = [(SMALL, True), (MIDDLE, True), (MIDDLE, False), (GPT_OSS, True), (GPT_OSS, False)]


@pytest.mark.parametrize(
    ("slice_name", "table", "is_tied"),
    [
        ("v6e-1", *CASES[0]),
        *(pytest.param("v6e-1", *case, marks=pytest.mark.sweep) for case in CASES[1:]),
        *(pytest.param("v6e-8", *case, marks=pytest.mark.sweep) for case in CASES),
    ],
)
def test_no_table_is_copied(slice_name, table, is_tied, tmp_path):
    vocab_size, hidden_size = table
    plan, program, compiled = compile_decode(
        tmp_path,
        slice_name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        tie_word_embeddings=is_tied,
    )
    weights, others = program.arguments[0], program.arguments[1:]
    assert not whole_array_copies(compiled.as_text(), weights)
    # The plan counts the padding of tables, and the device adds nearly none.
    counted = plan.weights_bytes + sum(map(device_bytes, jax.tree.leaves(others)))
    assert compiled.memory_analysis().argument_size_in_bytes == pytest.approx(counted, rel=0.01)
