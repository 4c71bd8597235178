"""What a plan says that devices hold between steps is what its programs take and leave."""

import jax
import pytest

from jaxllm.config import EngineArgs
from jaxllm.errors import OutOfMemoryError
from jaxllm.parallel.sharding import device_bytes
from jaxllm.plan import memory
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_stage_programs, make_packer
from jaxllm.programs.drafting import DRAFT_AHEAD
from jaxllm.runner.late import late_key
from jaxllm.runner.state import DeviceState
from jaxllm.testing import make_tiny_checkpoint

OPTIONS = {"max_model_len": 64, "num_gpu_blocks_override": 64, "block_size": 16, "max_num_seqs": 4}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Makes the tiny checkpoint of a family, once."""
    made = {}

    def model(family):
        if family not in made:
            path = tmp_path_factory.mktemp("model")
            made[family] = str(make_tiny_checkpoint(path, family, dtype="bfloat16"))
        return made[family]

    return model


def _bytes(arrays, shardings):
    leaves = jax.tree.leaves(arrays)
    shardings = jax.tree.leaves(jax.tree.broadcast(shardings, arrays))
    return sum(
        device_bytes(jax.ShapeDtypeStruct(its.shape, its.dtype, sharding=where))
        for its, where in zip(leaves, shardings, strict=True)
    )


def _left(program):
    """What a program leaves beside the state, and its bytes on a device."""
    _, left = jax.eval_shape(program.function, *program.arguments)
    return left, _bytes(left, program.out_shardings[1])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"max_logprobs": -1}),
        ("llama", {"skip_tokenizer_init": True}),
        ("qwen3_moe", {"count_expert_tokens": True, "spec_model": "llama"}),
        ("qwen3_5", {"speculative_config": NGRAM}),
        ("qwen3_5", {"speculative_config": {"method": "mtp"}}),
        ("kimi_linear", {"speculative_config": NGRAM}),
        ("nemotron_h", {"speculative_config": NGRAM}),
        ("lfm2", {"speculative_config": NGRAM}),
        ("llama", {"runner": "pooling"}),
        ("llama", {"pipeline_parallel_size": 2}),
    ],
)
def test_each_byte_between_steps_is_counted(models, family, options):
    if "spec_model" in options:
        options = options | {"spec_model": models(options["spec_model"])}
    plan = make_plan(EngineArgs(models(family), **OPTIONS, **options), jax.devices()[:1] * 2)
    layouts = make_packer(plan).layouts
    for stage in plan.stages:
        state = DeviceState.abstract(plan, stage)
        beside = sum(map(device_bytes, jax.tree.leaves(state)))
        beside -= stage.kv_cache_bytes + stage.states_bytes + stage.snapshots_bytes
        assert stage.between.tables_bytes == beside

        programs = declare_stage_programs(plan, stage, layouts)
        largest = max(layouts, key=lambda bucket: bucket.num_tokens)
        left, of_step = _left(programs[largest])
        if plan.samples_late and stage.part.has_head:
            of_step += _left(programs[late_key(plan, largest)])[1]
        if DRAFT_AHEAD in programs:
            of_step += _left(programs[DRAFT_AHEAD])[1]
        if plan.verifies_states_late:
            assert jax.tree.structure(left.kept) == jax.tree.structure(stage.between.kept)
        of_copies = 0
        if not stage.part.is_whole:
            # Hidden states come in; at the first stage, copies of the last one's tokens.
            arriving = device_bytes(programs[largest].arguments[3])
            if stage.part.embeds:
                of_copies = (len(plan.stages) + 2) * arriving
            else:
                of_step += arriving
        assert stage.between.steps_bytes == (1 + len(plan.stages)) * of_step + of_copies


def test_devices_share_what_is_kept_of_drafts(models):
    def kept_bytes(devices):
        options = OPTIONS | {"speculative_config": NGRAM, "tensor_parallel_size": len(devices)}
        (stage,) = make_plan(EngineArgs(models("qwen3_5"), **options), devices).stages
        return sum(map(device_bytes, jax.tree.leaves(stage.between.kept)))

    alone = kept_bytes(jax.devices()[:1])
    # Of two drafts for each of four rows in three layers: what enters the convolution, and keys,
    # values, decays and gates of the delta rule.
    of_conv, of_rule = 2 * (2 * 4 * 16 + 8 * 24), 4 * 4 * 16 + 2 * 8 * 24 + 2 * 4 * 8
    assert alone == 2 * 4 * 3 * (of_conv + of_rule)
    assert kept_bytes(jax.devices()[:1] * 2) == alone // 2


def test_all_of_it_must_be_there(models, monkeypatch):
    options = OPTIONS | {"speculative_config": NGRAM, "num_state_snapshots": 0}
    args = EngineArgs(models("qwen3_5"), **options)
    (stage,) = make_plan(args).stages
    needed = stage.weights_bytes + stage.kv_cache_bytes + stage.states_bytes
    needed += stage.between.num_bytes
    monkeypatch.setattr(memory, "_available_host_bytes", lambda: needed)
    make_plan(args)
    monkeypatch.setattr(memory, "_available_host_bytes", lambda: needed - 1)
    with pytest.raises(OutOfMemoryError, match="of sampler state and outputs; 1 B are missing"):
        make_plan(args)
