"""Steps of models with recurrent layers, compiled for an H200 that is not there: states of all
slots stay where they are, and kernels change those of the rows."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.hlo import whole_array_copies

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.gpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="no CUDA plugin of JAX: nothing is compiled for GPUs (see README)",
    ),
]

CONFIGS = Path(__file__).parents[1] / "models" / "released_configs.json"
NUM_ROWS = 64
# Logits, and what samples, beside the layers. Experts of 2048 tokens need more.
MAX_TEMP_BYTES = 256 << 20


@pytest.mark.parametrize("decode_only", [True, False])
def test_a_step_of_delta_nets_moves_no_states_of_all_slots(decode_only, tmp_path):
    config = json.loads(CONFIGS.read_text())["Qwen3.6 35B-A3B"]
    decoder = config["text_config"]
    # Three delta nets and a layer with attention, of ten times as many.
    decoder |= {"num_hidden_layers": 4, "layer_types": decoder["layer_types"][:4]}
    plan = _plan(config, tmp_path)
    assert plan.state_ops is not None and plan.state_ops.delta.name == "mosaic_sm90"
    most = MAX_TEMP_BYTES if decode_only else 304 << 20
    hlo = _assert_states_stay(plan, f"f32[{NUM_ROWS},32,128,128]", decode_only, most)
    assert ("delta_rows_mosaic_gpu" in hlo) == (not decode_only)


@pytest.mark.parametrize("decode_only", [True, False])
def test_a_step_of_mamba2_moves_no_states_of_all_slots(decode_only, tmp_path):
    config = json.loads(CONFIGS.read_text())["Nemotron 3 Nano 30B-A3B"]
    # Three Mamba2, two of experts and one of attention without a rotation, of 52 layers.
    config |= {"num_hidden_layers": 6, "hybrid_override_pattern": "MEMEM*"}
    plan = _plan(config, tmp_path)
    assert plan.state_ops is not None and plan.state_ops.ssd.name == "mosaic_sm90"
    most = MAX_TEMP_BYTES if decode_only else 448 << 20
    hlo = _assert_states_stay(plan, f"f32[{NUM_ROWS},64,64,128]", decode_only, most)
    for kernel in ("place_heads", "paged_decode", "ssd_decode", "experts_up", "experts_down"):
        assert f"{kernel}_mosaic_gpu" in hlo, kernel
    assert ("ssd_rows_mosaic_gpu" in hlo) == (not decode_only)


def _plan(config: dict[str, Any], folder: Path) -> EnginePlan:
    (folder / "config.json").write_text(json.dumps(config))
    args = EngineArgs(
        model=str(folder),
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        num_gpu_blocks_override=1024,
    )
    return make_plan(args, topology_devices("h200"))


def _assert_states_stay(
    plan: EnginePlan, states: str, decode_only: bool, max_temp_bytes: int
) -> str:
    """Compile the largest step of decodes alone, or of any rows, and return its program. `states`
    are a layer's, of all slots."""
    declared = declare_programs(plan, make_packer(plan).layouts)
    bucket = max(bucket for bucket in plan.buckets if bucket.decode_only == decode_only)
    program = declared[bucket]
    compiled = program.compile(program.lower())
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    assert hlo is not None and memory is not None
    weights, state, _ = program.arguments
    arrays = jax.tree.leaves((weights, state.caches, state.snapshots))
    assert not whole_array_copies(hlo, arrays)
    # Fusions are copies to and from snapshots, in place.
    made = re.findall(rf"= {re.escape(states)}\S* ([\w-]+)\(", hlo)
    assert made and not {"copy", "copy-start", "gather", "scatter"} & set(made)
    in_place = plan.kv_cache_bytes + plan.states_bytes + plan.snapshots_bytes
    assert memory.alias_size_in_bytes >= in_place
    assert memory.temp_size_in_bytes < max_temp_bytes
    return hlo
