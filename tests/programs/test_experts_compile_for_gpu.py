"""Steps of a model with experts, compiled for H200s that are not there: two of its layers."""

import importlib.util
import json

import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.hlo import collectives, whole_array_copies
from jaxllm.programs.launches import by_name, compile_and_list, in_command_buffer

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="no CUDA plugin of JAX: nothing is compiled for GPUs (see README)",
    ),
]

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "attention_bias": False,
}
HIDDEN_SIZE = 2048
# Of a layer, by the tokens of a step: attention, norms, the router, and the experts. Those of the
# experts are 2 kernels, 2 to sort choices, 1 to add up outputs, and what arranges rows: 3 launches
# for tokens that share them, 7 for others.
LAUNCHES = {8: 26, 64: 28, 2048: 34}
# Beside the layers: logits and what samples. Rows of experts, and what is made of them, are most
# of the rest of a prefill.
MAX_TEMP_BYTES = {8: 32 << 20, 64: 256 << 20, 2048: 400 << 20}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model directory without weights."""
    path = tmp_path_factory.mktemp("qwen3_30b_a3b")
    (path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    return str(path)


def program_of(model, num_layers, num_tokens, num_devices=1):
    """A decode, or of more than 64 tokens a mixed step."""
    args = EngineArgs(
        model=model,
        hf_overrides={"num_hidden_layers": num_layers},
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=1024,
        tensor_parallel_size=num_devices,
        enable_expert_parallel=num_devices > 1,
    )
    name = "h200" if num_devices == 1 else f"h200-{num_devices}"
    plan = make_plan(args, topology_devices(name))
    assert plan.experts.name == "mosaic_sm90"
    declared = declare_programs(plan, make_packer(plan).layouts)
    shape = num_tokens <= 64, num_tokens
    bucket = next(b for b in plan.buckets if (b.decode_only, b.num_tokens) == shape)
    return declared[bucket]


def assert_copies_no_weights(program, compiled):
    weights, state, _ = program.arguments
    assert not whole_array_copies(compiled.as_text(), [*weights, *state.caches])


@pytest.mark.parametrize(
    "num_tokens", [n if n == 64 else pytest.param(n, marks=pytest.mark.sweep) for n in LAUNCHES]
)
def test_a_step(num_tokens, model, tmp_path):
    launches = []
    for num_layers in (1, 2):
        program = program_of(model, num_layers, num_tokens)
        _, compiled, listed = compile_and_list(program, tmp_path / str(num_layers))
        launches.append(in_command_buffer(listed))
    assert_copies_no_weights(program, compiled)
    assert not collectives(compiled.as_text())
    assert compiled.memory_analysis().temp_size_in_bytes < MAX_TEMP_BYTES[num_tokens]
    one, two = launches
    assert len(two) - len(one) <= LAUNCHES[num_tokens], by_name(two) - by_name(one)


@pytest.mark.parametrize("num_tokens", [pytest.param(64, marks=pytest.mark.sweep), 2048])
def test_experts_on_devices_exchange_one_sum(num_tokens, model):
    program = program_of(model, 2, num_tokens, num_devices=8)
    compiled = program.compile(program.lower())
    assert_copies_no_weights(program, compiled)
    # Of the embedding, and of a layer's attention and experts.
    row_bytes = num_tokens * HIDDEN_SIZE * 2
    sums = [c for c in collectives(compiled.as_text()) if c.num_bytes == row_bytes]
    assert [c.opcode for c in sums] == ["all-reduce"] * (1 + 2 * 2)
    assert compiled.memory_analysis().temp_size_in_bytes < MAX_TEMP_BYTES[num_tokens]
