"""Steps of models whose weights are codes of 8 bits, of real width, compiled for chips that are not
there. Nothing writes the weights of a layer in more bits."""

import importlib.util
import json
import re

import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.hlo import whole_array_copies
from jaxllm.testing import tiny_config

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="no libtpu: nothing is compiled for TPUs (pip install '.[tpu]')",
)
needs_cuda_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="no CUDA plugin of JAX: nothing is compiled for GPUs (see README)",
)
HIDDEN, INTERMEDIATE = 2048, 5632
SIZES = {
    "vocab_size": 32_000,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
BLOCKS = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}


def outside_fusions(hlo: str) -> str:
    """The instructions that have results in memory. Those of a fusion have none."""
    fused = set(re.findall(r"calls=%?([\w.-]+)", hlo))
    computations = re.split(r"\n(?=(?:ENTRY )?%?[\w.-]+ \()", hlo)
    names = (re.match(r"(?:ENTRY )?%?([\w.-]+) \(", its) for its in computations)
    kept = [c for c, name in zip(computations, names, strict=True) if name and name[1] not in fused]
    assert 1 <= len(kept) < len(computations)
    return "\n".join(kept)


def check_steps(tmp_path, chip, quantization, decode_only=(True, False)):
    blocks = {"quantization_config": BLOCKS} if quantization == "blocks" else {}
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama") | SIZES | blocks))
    args = EngineArgs(
        model=str(tmp_path),
        quantization=None if blocks else quantization,
        max_num_seqs=32,
        max_num_batched_tokens=192,
        max_model_len=2048,
        num_gpu_blocks_override=2003,
    )
    plan = make_plan(args, topology_devices(chip)[:1])
    programs = declare_programs(plan, make_packer(plan).layouts)
    for kind in decode_only:
        bucket = max(b for b in plan.buckets if b.decode_only == kind)
        program = programs[bucket]
        compiled = program.compile(program.lower())
        weights, state, _ = program.arguments
        hlo = outside_fusions(compiled.as_text())
        assert not whole_array_copies(hlo, [*weights, *state.caches])
        shapes = {tuple(w.shape) for w in weights if w.dtype.itemsize == 1}
        assert len(shapes) == 4
        for rows, columns in shapes:
            assert re.search(rf"\b(s8|f8e4m3fn)\[{rows},{columns}\]", hlo)
            wide = re.search(rf"\b(bf16|f32)\[({rows},{columns}|{columns},{rows})\].*", hlo)
            assert wide is None, wide
    layers = 2 * HIDDEN * (3 * INTERMEDIATE + (16 + 4 + 4 + 16) * 128)
    embedding_and_head = 2 * 2 * 32_000 * HIDDEN
    scales = 4 * layers // 128 if blocks else 0
    assert plan.weights_bytes == pytest.approx(layers + embedding_and_head + scales, rel=0.003)


@pytest.mark.sweep
@pytest.mark.tpu_compile
@needs_libtpu
@pytest.mark.parametrize(
    ("chip", "quantization"), [("v6e-1", "int8"), ("v7x-8", "fp8"), ("v7x-8", "blocks")]
)
def test_steps_for_tpus_write_no_weights(chip, quantization, tmp_path):
    check_steps(tmp_path, chip, quantization)


@pytest.mark.tpu_compile
@needs_libtpu
def test_a_mixed_step_for_a_tpu_writes_no_weights(tmp_path):
    check_steps(tmp_path, "v7x-8", "blocks", decode_only=(False,))


@pytest.mark.gpu_compile
@needs_cuda_plugin
@pytest.mark.parametrize(
    ("quantization", "decode_only"),
    [
        ("int8", True),
        ("blocks", False),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in [("int8", False), ("blocks", True), ("fp8", True), ("fp8", False)]
        ),
    ],
)
def test_a_step_for_gpus_writes_no_weights(quantization, decode_only, tmp_path):
    check_steps(tmp_path, "h200", quantization, (decode_only,))
