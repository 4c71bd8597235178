"""Plans of models whose layers keep a state of each request: its bytes, and what they refuse."""

import dataclasses
import math

import jax
import pytest

from jaxllm.cache_groups import StateSnapshots
from jaxllm.config import EngineArgs
from jaxllm.errors import OutOfMemoryError, ValidationError
from jaxllm.plan import memory
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.hlo import whole_array_copies
from jaxllm.programs.report import roofline
from jaxllm.programs.summary import summary
from jaxllm.runner.late import LateKey
from jaxllm.testing import make_tiny_checkpoint

OPTIONS = {"max_model_len": 64, "num_gpu_blocks_override": 64, "block_size": 16, "max_num_seqs": 4}
# Of the tiny model's three delta nets, in 16 bits: three inputs of the convolution, and matrices.
INPUTS, MATRICES = 3 * (2 * 4 * 16 + 8 * 24) * 2, 8 * 16 * 24 * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return str(make_tiny_checkpoint(path, "qwen3_5", dtype="bfloat16"))


def test_a_request_has_a_state_in_every_recurrent_layer(model):
    plan = make_plan(EngineArgs(model, **OPTIONS))
    (stage,) = plan.stages
    assert [[array.shape for array in its] for its in stage.state_shapes] == [
        [(4, 3, 320), (4, 8, 16, 24)]
    ] * 3
    assert [array.dtype.name for array in stage.state_shapes[0]] == ["uint16", "float32"]
    assert plan.states_bytes == 4 * 3 * (INPUTS + MATRICES)
    # One layer of four has attention.
    assert len(stage.cache_shapes) == len(plan.attention_configs) == 1
    text = summary(plan)
    assert "recurrent layers 'native' and 'xla'" in text
    assert f"{memory.format_bytes(3 * (INPUTS + MATRICES))} for each of max_num_seqs=4" in text
    assert plan.info().keeps_states


def test_snapshots_are_counted_and_told(model):
    plan = make_plan(EngineArgs(model, **OPTIONS))
    assert plan.snapshots == plan.info().snapshots == StateSnapshots(count=8, stride=512)
    assert plan.snapshots_bytes == 8 * 3 * (INPUTS + MATRICES)
    size = memory.format_bytes(plan.snapshots_bytes)
    assert f"8 snapshots, at multiples of 512 tokens, take {size}" in summary(plan)
    asked = {"num_state_snapshots": 3, "mamba_block_size": 48}
    plan = make_plan(EngineArgs(model, **OPTIONS, **asked))
    assert plan.snapshots == StateSnapshots(count=3, stride=48)
    assert plan.stages[0].snapshot_shapes[0][1].shape == (3, 8, 16, 24)


def test_snapshots_have_a_share_of_what_is_free_beside_all_others(model, monkeypatch):
    (stage,) = make_plan(EngineArgs(model, **OPTIONS)).stages
    beside = stage.weights_bytes + stage.states_bytes + stage.between.num_bytes
    # A tenth of the rest has room for two, and with a byte less for one.
    available = beside + 10 * 2 * 3 * (INPUTS + MATRICES)
    adapters = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    its = make_plan(EngineArgs(model, **OPTIONS, **adapters)).adapters
    assert its is not None
    (of_adapters,) = its.bytes_by_stage
    for options, beside_them in (({}, 0), (adapters, of_adapters)):
        for missing, count in ((0, 2), (10, 1)):
            free = available + beside_them - missing
            monkeypatch.setattr(memory, "_available_host_bytes", lambda free=free: free)
            plan = make_plan(EngineArgs(model, **OPTIONS, **options))
            assert plan.snapshots is not None and plan.snapshots.count == count


@pytest.mark.parametrize(
    "options",
    [{"enable_prefix_caching": False}, {"num_state_snapshots": 0}],
)
def test_there_is_no_prefix_caching_without_snapshots(model, options):
    plan = make_plan(EngineArgs(model, **OPTIONS, **options))
    assert plan.snapshots is None and plan.snapshots_bytes == 0
    assert "no snapshots, so no prefix caching" in summary(plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mamba_block_size": 20}, "mamba_block_size=20: give a multiple of the block size"),
        (
            {"num_state_snapshots": 0, "enable_prefix_caching": True},
            "enable_prefix_caching=True: the model has recurrent layers, and there are no snap",
        ),
    ],
)
def test_snapshots_that_cannot_be_are_refused(model, options, message):
    with pytest.raises(ValidationError, match=message):
        make_plan(EngineArgs(model, **OPTIONS, **options))


@pytest.mark.parametrize("option", ["mamba_block_size", "num_state_snapshots"])
def test_snapshots_of_a_model_without_states_are_refused(tmp_path, option):
    model = str(make_tiny_checkpoint(tmp_path))
    with pytest.raises(ValidationError, match=f"{option}=64: the model has no recurrent layers"):
        make_plan(EngineArgs(model, **OPTIONS, **{option: 64}))


def test_heads_are_cut_over_devices(model):
    devices = jax.devices()[:1] * 2
    plan = make_plan(EngineArgs(model, tensor_parallel_size=2, **OPTIONS), devices)
    assert plan.states_bytes == 4 * 3 * (INPUTS + MATRICES) // 2
    with pytest.raises(
        ValidationError, match="it does not divide the model's linear_num_key_heads"
    ):
        options = OPTIONS | {"hf_overrides": {"linear_num_key_heads": 1}}
        make_plan(EngineArgs(model, tensor_parallel_size=2, **options), devices)


def test_each_stage_has_the_states_of_its_layers(model):
    devices = jax.devices()[:1] * 2
    plan = make_plan(EngineArgs(model, pipeline_parallel_size=2, **OPTIONS), devices)
    assert [len(stage.state_shapes) for stage in plan.stages] == [2, 1]


def test_states_that_do_not_fit_are_refused_by_their_bytes(model, monkeypatch):
    monkeypatch.setattr(memory, "_available_host_bytes", lambda: 12 << 20)
    with pytest.raises(OutOfMemoryError, match=r"MiB of states, .* KiB for each of 256 requests"):
        make_plan(EngineArgs(model, **OPTIONS | {"max_num_seqs": 256}))


def test_a_bound_counts_states_as_read_and_written(model):
    plan = make_plan(EngineArgs(model, **OPTIONS))
    chip = dataclasses.replace(plan.chip, hbm_bytes_per_second=1e6, bf16_flops_per_second=1e18)
    line = roofline(dataclasses.replace(plan, chip=chip), *plan.stages)
    assert line is not None
    assert line.state_bytes_per_row == 2 * 3 * (INPUTS + MATRICES)
    assert line.attention(1, 0)[0] == line.state_bytes_per_row
    assert len(line.windows) == 1


def test_a_draft_with_states_is_refused(model):
    with pytest.raises(ValidationError, match="cannot draft for this model: it has recurrent lay"):
        make_plan(EngineArgs(model, **OPTIONS, spec_model=model))


def test_the_program_that_verifies_drafts_under_a_grammar_updates_states_in_place(model):
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    plan = make_plan(EngineArgs(model, **OPTIONS, speculative_config=drafts))
    programs = declare_programs(plan, make_packer(plan).layouts)
    late = max(key for key in programs if isinstance(key, LateKey) and key.num_drafts)
    compiled = programs[late].compile(programs[late].lower())
    states = jax.tree.leaves(plan.stages[0].state_shapes)
    assert not list(whole_array_copies(compiled.as_text(), states))
    num_bytes = sum(math.prod(its.shape) * its.dtype.itemsize for its in states)
    assert compiled.memory_analysis().alias_size_in_bytes >= num_bytes
