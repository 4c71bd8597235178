"""A decode step of Qwen3.5-35B-A3B's layers, cut over TPU chips that are not there: the states of
all slots stay where they are, and kernels read and write those of the step's rows."""

import importlib.util
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.plan.buckets import Bucket
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.hlo import collectives, whole_array_copies

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="no libtpu: nothing is compiled for TPUs (pip install '.[tpu]')",
    ),
]

CONFIGS = Path(__file__).parents[1] / "models" / "released_configs.json"
# Three delta nets and a layer with attention, of ten times as many.
NUM_LAYERS, NUM_SHARDS = 4, 8


# What XLA does with an array of all slots to bring it elsewhere, or to reach its rows.
MOVES = {"copy", "copy-start", "copy-done", "gather", "scatter", "dynamic-update-slice"}


@dataclass(frozen=True)
class Decodes:
    """The program of 64 decodes of a model's first layers, over eight chips."""

    plan: EnginePlan
    bucket: Bucket
    arguments: tuple[Any, ...]
    compiled: jax.stages.Compiled

    @classmethod
    def compile(cls, config: dict[str, Any], chip: str, folder: Path) -> "Decodes":
        (folder / "config.json").write_text(json.dumps(config))
        args = EngineArgs(
            model=str(folder),
            max_num_seqs=64,
            max_num_batched_tokens=1024,
            max_model_len=4096,
            tensor_parallel_size=NUM_SHARDS,
            enable_expert_parallel=True,
        )
        plan = make_plan(args, topology_devices(f"{chip}-8")[:NUM_SHARDS])
        declared = declare_programs(plan, make_packer(plan).layouts)
        bucket = max(bucket for bucket in plan.buckets if bucket.decode_only)
        program = declared[bucket]
        return cls(plan, bucket, program.arguments, program.compile(program.lower()))

    def opcodes(self, array: str) -> set[str]:
        """Of the instructions whose result is an array."""
        made = re.findall(rf"= {re.escape(array)}\S* ([\w-]+)\(", self.compiled.as_text())
        return set(made)


@pytest.mark.parametrize("chip", ["v6e", "v7x"])
def test_a_decode_step_moves_no_states_of_all_slots(chip, tmp_path):
    """A device has 16 MiB of matrices in a layer, and 512 KiB of inputs of convolutions, which XLA
    would take into VMEM and back."""
    config = json.loads(CONFIGS.read_text())["Qwen3.6 35B-A3B"]
    decoder = config["text_config"]
    decoder |= {"num_hidden_layers": NUM_LAYERS, "layer_types": decoder["layer_types"][:NUM_LAYERS]}
    decodes = Decodes.compile(config, chip, tmp_path)
    plan, bucket, compiled = decodes.plan, decodes.bucket, decodes.compiled
    ops = plan.state_ops
    assert ops is not None
    assert {op.name for op in (ops.conv, ops.delta, ops.copies)} == {"tpu"}
    weights, state, _ = decodes.arguments
    hlo, memory = compiled.as_text(), compiled.memory_analysis()

    matrices = [
        array for its in plan.stages[0].state_shapes for array in its if len(array.shape) == 4
    ]
    assert {array.sharding.shard_shape(array.shape) for array in matrices} == {(64, 4, 128, 128)}
    arrays = jax.tree.leaves((weights, state.caches, state.snapshots))
    assert not whole_array_copies(hlo, arrays)
    # `copies` takes what enters VMEM for a prefetch.
    assert "f32[64,4,128,128]{3,2,1,0:T(8,128)S(1)}" not in hlo
    # Arrays of the step's rows have this shape, too, and are in VMEM.
    assert "custom-call" in (made := decodes.opcodes("u16[64,4,1024]")) and not MOVES & made
    in_place = plan.kv_cache_bytes + plan.states_bytes + plan.snapshots_bytes
    assert memory.alias_size_in_bytes >= in_place
    # The states of a layer are 16 MiB, the logits of all rows 7.6.
    layer_bytes = math.prod((64, 4, 128, 128)) * 4
    assert memory.temp_size_in_bytes < 3 * layer_bytes

    size = bucket.num_tokens * decoder["hidden_size"] * 2
    of_rows = [c.opcode for c in collectives(hlo) if c.num_bytes == size]
    assert set(of_rows) == {"all-reduce"} and len(of_rows) <= 2 * NUM_LAYERS + 1


def test_a_decode_step_moves_no_states_of_mamba2(tmp_path):
    """Three mixers of Nemotron 3 Nano: 16 MiB of matrices and 384 KiB of inputs in each."""
    config = json.loads(CONFIGS.read_text())["Nemotron 3 Nano 30B-A3B"]
    pattern = config["hybrid_override_pattern"][:6]
    assert pattern == "MEMEM*"
    decodes = Decodes.compile(
        config | {"num_hidden_layers": len(pattern), "hybrid_override_pattern": pattern},
        "v6e",
        tmp_path,
    )
    plan = decodes.plan
    assert plan.state_ops is not None and plan.state_ops.ssd.name == "tpu"
    shapes = {a.sharding.shard_shape(a.shape) for its in plan.stages[0].state_shapes for a in its}
    assert shapes == {(64, 4, 768), (64, 8, 64, 128)}
    # Nor are experts copied, which have no gates.
    assert plan.experts is not None and plan.experts.name == "tpu"
    weights, _, _ = decodes.arguments
    assert not whole_array_copies(decodes.compiled.as_text(), weights)
    assert not MOVES & (decodes.opcodes("u16[64,4,768]") | decodes.opcodes("f32[64,8,64,128]"))
    in_place = plan.kv_cache_bytes + plan.states_bytes + plan.snapshots_bytes
    assert decodes.compiled.memory_analysis().alias_size_in_bytes >= in_place


def test_a_decode_step_of_a_whole_granite_copies_nothing(tmp_path):
    """All layers of Granite 4.0 H Small: 36 of Mamba2 and four with attention, each with experts
    and a shared MLP."""
    config = json.loads(CONFIGS.read_text())["Granite 4.0 H Small"]
    decodes = Decodes.compile(config, "v6e", tmp_path)
    plan, bucket, compiled = decodes.plan, decodes.bucket, decodes.compiled
    assert plan.experts is not None and plan.experts.name == "tpu"
    assert plan.state_ops is not None and plan.state_ops.ssd.name == "tpu"
    weights, state, _ = decodes.arguments
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    assert not whole_array_copies(hlo, jax.tree.leaves((weights, state.caches, state.snapshots)))
    assert not MOVES & (decodes.opcodes("u16[64,4,1280]") | decodes.opcodes("f32[64,16,64,128]"))
    in_place = plan.kv_cache_bytes + plan.states_bytes + plan.snapshots_bytes
    assert memory.alias_size_in_bytes >= in_place
    # Two layers' states.
    assert memory.temp_size_in_bytes < 2 * 64 * 16 * 64 * 128 * 4

    # A sum for the embedding, and two for each layer: the shared MLP's is in that of the experts.
    of_rows = [
        c for c in collectives(hlo) if c.num_bytes == bucket.num_tokens * config["hidden_size"] * 2
    ]
    assert [c.opcode for c in of_rows] == ["all-reduce"] * (2 * config["num_hidden_layers"] + 1)
