"""Steps of models with recurrent layers, compiled for H200s that are not there: states of all slots
stay where they are, and kernels change those of the rows."""

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.layers.gated_delta import GatedDeltaSpec
from jaxllm.layers.mamba import MambaSpec
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.hlo import collectives, whole_array_copies

pytestmark = [
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
# Over devices, what exchanges logits and the numbers with which rows sample.
MOST_OTHER_COLLECTIVES = 21


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@dataclass(frozen=True)
class Model:
    """A model over several devices, with sizes of all of them."""

    name: str  # in CONFIGS
    mixer: type  # of its states
    op: str  # of the mixer
    num_heads: int
    head: str  # the matrix of a head's state
    hidden_size: int
    sums_of_layer: int  # over devices: of the outputs of a mixer, and of experts
    # Temporaries of decodes and of a few layers, and of all layers for 1024 tokens. Most of them
    # are logits.
    max_temp_mib: tuple[int, int]


DELTA_NETS = Model("Qwen3.6 35B-A3B", GatedDeltaSpec, "delta", 32, "128,128", 2048, 2, (400, 520))
MAMBA2 = Model("Nemotron 3 Nano 30B-A3B", MambaSpec, "ssd", 64, "64,128", 2688, 1, (256, 420))


@pytest.mark.parametrize(
    ("model", "num_layers", "num_devices", "decode_only"),
    [
        (DELTA_NETS, 1, 2, False),
        (MAMBA2, 2, 2, False),
        *(
            pytest.param(model, num_layers, num_devices, decode_only, marks=pytest.mark.sweep)
            for model, num_layers in ((DELTA_NETS, 40), (MAMBA2, 52))
            for num_devices in (2, 8)
            for decode_only in (True, False)
        ),
    ],
    ids=lambda value: value.op if isinstance(value, Model) else value,
)
def test_a_step_over_devices(model, num_layers, num_devices, decode_only, tmp_path):
    """Each device has the kernels for its heads. Devices exchange what they would without states:
    rows, and no states."""
    config = json.loads(CONFIGS.read_text())[model.name]
    plan = _plan(_with_layers(config, num_layers), tmp_path, num_devices)
    assert getattr(plan.state_ops, model.op).name == "mosaic_sm90"
    states = f"f32[{NUM_ROWS},{model.num_heads // num_devices},{model.head}]"
    max_temp_mib = model.max_temp_mib[not decode_only and num_layers > 2]
    hlo = _assert_states_stay(plan, states, decode_only, max_temp_mib << 20)
    mixers = [mixer for layer in plan.architecture.layers for mixer in layer.mixers]
    num_mixers = sum(isinstance(mixer, model.mixer) for mixer in mixers)
    for kernel, count in (("decode", num_mixers), ("rows", 0 if decode_only else num_mixers)):
        assert len(re.findall(rf"custom-call\(.*/{model.op}_{kernel}/", hlo)) == count, kernel
    num_tokens = NUM_ROWS if decode_only else plan.max_num_batched_tokens
    row_bytes = num_tokens * model.hidden_size * 2
    exchanged = collectives(hlo)
    # Of the embedding, and of the layers; experts with a shared one are added up in float32.
    sums = [x for x in exchanged if x.num_bytes in (row_bytes, 2 * row_bytes)]
    assert [x.opcode for x in sums] == ["all-reduce"] * (1 + model.sums_of_layer * num_layers)
    # Beside these, logits and what samples. They do not grow with the layers.
    assert len(exchanged) - len(sums) <= MOST_OTHER_COLLECTIVES


def _with_layers(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The first layers of a model."""
    if "text_config" in config:
        decoder = config["text_config"]
        of_layers = {"layer_types": decoder["layer_types"][:num_layers]}
        return config | {"text_config": decoder | of_layers | {"num_hidden_layers": num_layers}}
    pattern = config["hybrid_override_pattern"][:num_layers]
    return config | {"num_hidden_layers": num_layers, "hybrid_override_pattern": pattern}


def _plan(config: dict[str, Any], folder: Path, num_devices: int = 1) -> EnginePlan:
    (folder / "config.json").write_text(json.dumps(config))
    args = EngineArgs(
        model=str(folder),
        max_num_seqs=NUM_ROWS,
        # Over devices other than 2048, which is a size of their weights.
        max_num_batched_tokens=2048 if num_devices == 1 else 1024,
        max_model_len=4096,
        num_gpu_blocks_override=1024,
        tensor_parallel_size=num_devices,
        enable_expert_parallel=num_devices > 1,
    )
    return make_plan(args, topology_devices("h200" if num_devices == 1 else f"h200-{num_devices}"))


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
