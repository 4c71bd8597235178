"""Blocks of an engine over several hosts go to the memory of each, and come back to where they
were, also on a host that is late, and from files of all hosts after a restart, in which no rank
compiles what it has compiled before."""

import hashlib
import json
import shutil

import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.offload.identity import block_identity
from jaxllm.plan.make_plan import make_plan
from jaxllm.scheduler.kv.prefix_hash import block_hashes, root_hash
from jaxllm.testing import make_tiny_checkpoint
from tests.executor.test_multihost import Ranks
from tests.profile import OVER_HOSTS, SHARDED_MODEL

# What a rank runs. A late rank copies nothing to its memory before it has waited.
START = """
import json, sys, time
from jaxllm import LLM, SamplingParams
from jaxllm.offload.host_blocks import HostBlocks
from jaxllm.plan import snapshots

options, prompts, late = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
if str(options["node_rank"]) == late:
    fill = HostBlocks.fill
    HostBlocks.fill = lambda *args: (time.sleep(0.1), fill(*args))
if options["node_rank"] == 1:
    # It has room for fewer snapshots of states than rank 0.
    snapshots._MOST_PER_REQUEST = 1
llm = LLM(**options)
params = [
    SamplingParams(seed=index % 3, max_tokens=48, ignore_eos=True, logprobs=2)
    for index in range(len(prompts))
]

def answers(outputs):
    return [
        [a.token_ids, [[its.logprob for its in at.values()] for at in a.logprobs]]
        for output in outputs for a in output.outputs
    ]

def generate(prompts=prompts, params=params):
    before = llm.llm_engine.stats()
    found = answers(llm.generate(prompts, params, use_tqdm=False))
    its = llm.llm_engine.stats()
    names = (
        "num_preemptions", "host_blocks_loaded", "external_cache_hits", "host_blocks_dropped",
        "host_blocks_read",
    )
    return found, {name: getattr(its, name) - getattr(before, name) for name in names}

def alone(prompt, its):
    llm.reset_prefix_cache()
    return answers(llm.generate([prompt], its, use_tqdm=False))[0]

def say_and_leave(said):
    # Files of the prompts, and of the last snapshot in each: one that a request has passed is of
    # no use to it, and gets no file.
    llm.reset_prefix_cache()
    llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    llm.shutdown()  # writes what has no file yet
    print("said", json.dumps(said), flush=True)
"""

SCRIPT = (
    START
    + """
def aborted():
    engine = llm.llm_engine
    for index, (prompt, its) in enumerate(zip(prompts, params)):
        engine.add_request(str(index), prompt, its)
    steps, kept = 0, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason != "abort":
                kept[output.request_id] = answers([output])[0]
        steps += 1
        if steps in (15, 25):
            engine.abort_request([str(steps // 10)])
    return kept

said = {"alone": [alone(*its) for its in zip(prompts, params)]}
llm.reset_prefix_cache()
said["crowd"], said["again"] = generate(), generate()
llm.reset_prefix_cache()
said["forgotten"] = generate()
said["aborted"] = aborted()
say_and_leave(said)
"""
)

ALONE = (
    START
    + """
say_and_leave([alone(*its) for its in zip(prompts, params)])
"""
)

# One prompt after the other, by an engine that has just been started.
RESTARTED = (
    START
    + """
print("said", json.dumps([generate([one], [its]) for one, its in zip(prompts, params)]), flush=True)
"""
)

PROMPTS = [
    {"prompt_token_ids": [3 + (n * 131 + i * i * 7 + i) % 380 for i in range(30 + 4 * n)]}
    for n in range(4)
]
# Blocks for hardly more than one of four running requests.
FEW = {
    "max_model_len": 96,
    "num_gpu_blocks_override": 14,
    "kv_offloading_size": 0.004,
    "check_invariants": True,
}
# The models, and what they need. Alone and in a crowd they give the same bits.
WHOLE = SHARDED_MODEL | {"use_sliding_window": False}, {}
WINDOWS = SHARDED_MODEL, {"kv_cache_request_len": 48}
# The state of a convolution is its last inputs.
CONVOLUTIONS = {"family": "lfm2"}, {"mamba_block_size": 16}
# Where XLA multiplies, these differ in their last bits, on one host without a second home, too.
DELTA_NETS = {"family": "qwen3_next", "num_key_value_heads": 2}, {"mamba_block_size": 16}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "tensor", "late"),
    [
        pytest.param(CONVOLUTIONS, 2, "1", id="states"),
        pytest.param(WINDOWS, 2, "0", id="windows", marks=pytest.mark.sweep),
    ],
)
def test_neither_preemption_nor_a_restart_changes_a_bit(model, tensor, late, tmp_path):
    options = options_for(model, tmp_path, tensor)
    blocks = tmp_path / "blocks"
    options |= {"kv_offloading_path": str(blocks)}
    expected = compare(options, 1, late, atol=0)
    check_layouts(options, [list(path.glob("*.kv")) for path in (blocks, blocks / "rank-1")])
    # Of one prompt a part is damaged, and of another it is gone.
    for path in first_blocks(blocks / "rank-1", PROMPTS[1]):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    for path in first_blocks(blocks / "rank-1", PROMPTS[2]):
        path.unlink()
    answers, stats = restarted(options)
    assert_equal(answers, expected, atol=0)
    assert [its["external_cache_hits"] > 0 for its in stats] == [True, False, False, True], stats
    assert [its["host_blocks_read"] > 0 for its in stats] == [True, True, False, True], stats
    assert [its["host_blocks_dropped"] > 0 for its in stats] == [False, True, False, False], stats


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("model", "devices", "tensor", "atol"),
    [
        pytest.param(CONVOLUTIONS, 1, 2, 0, id="states"),
        # Sums over all four have other last bits in chunks behind what was found.
        pytest.param(WHOLE, 2, 4, 1e-4, id="four shards"),
    ],
)
def test_without_the_files_of_a_rank_there_are_none(model, devices, tensor, atol, tmp_path):
    options = options_for(model, tmp_path, tensor)
    options |= {"kv_offloading_path": str(tmp_path / "blocks")}
    expected = ranks_say(options, devices, ALONE)
    answers, stats = restarted(options, devices)
    assert_equal(answers, expected, atol)
    assert all(its["external_cache_hits"] and its["host_blocks_read"] for its in stats), stats
    shutil.rmtree(tmp_path / "blocks" / "rank-1")
    answers, stats = restarted(options, devices)
    assert_equal(answers, expected, atol)
    assert not any(its["external_cache_hits"] or its["host_blocks_read"] for its in stats), stats


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("model", "devices", "tensor", "data", "late", "atol"),
    [
        pytest.param(WHOLE, 1, 2, 1, "0", 0, id="rank 0 late"),
        # A replica of which rank 0 has nothing.
        pytest.param(CONVOLUTIONS, 1, 1, 2, "1", 0, id="replicas"),
        pytest.param(DELTA_NETS, 1, 2, 1, "1", 1e-4, id="delta nets"),
        # Each kv head is on two devices, of one host. Sums over all four have other last bits in a
        # crowd, without a second home, too, but not in one process.
        pytest.param(WHOLE, 2, 4, 1, "1", 1e-4, id="four shards"),
    ],
)
def test_preemption_changes_no_bits_that_a_crowd_leaves(
    model, devices, tensor, data, late, atol, tmp_path
):
    compare(options_for(model, tmp_path, tensor, data), devices, late, atol)


def options_for(model, path, tensor, data=1):
    fields, needed = model
    path = make_tiny_checkpoint(path / "model", **fields)
    options = OVER_HOSTS | FEW | needed | {"model": str(path)}
    return options | {"tensor_parallel_size": tensor, "data_parallel_size": data}


def ranks_say(options, devices, script, late="", *, compiles=True):
    with Ranks(options, PROMPTS, nnodes=2, devices=devices, then=late, script=script) as ranks:
        (status, lines, err), other = ranks.ends()
    assert (status, other[:2]) == (0, (0, [])), (err, other[2])
    if not compiles:
        assert "now that it is needed" not in err + other[2]
    return json.loads(lines[-1])


def restarted(options, devices=1):
    """The answers of a new engine to one prompt after the other, and figures of each. Its ranks
    have kept what they once compiled."""
    said = ranks_say(options, devices, RESTARTED, compiles=False)
    return [answer for (answer,), _ in said], [its for _, its in said]


def first_blocks(directory, prompt):
    """The files of a prompt's first block, in all groups."""
    ids, size = prompt["prompt_token_ids"], OVER_HOSTS["block_size"]
    (content,) = block_hashes(root_hash(None), ids[:size], size, {})
    found = list(directory.glob(f"*-{content.hex()}-*.kv"))
    assert found
    return found


def check_layouts(options, files_of_ranks):
    """Each rank has files of its own layout, and an engine on one host has another."""
    kinds = [{path.name.partition("-")[0] for path in files} for files in files_of_ranks]
    options = options | {"tensor_parallel_size": 1}
    plan = make_plan(EngineConfig.create(options.pop("model"), **options))
    kinds.append({hashlib.sha256(block_identity(plan)).digest()[:8].hex()})
    assert len(set.union(*kinds)) == len(kinds) == sum(map(len, kinds)), kinds


def compare(options, devices, late, atol):
    """Compare a crowd that is preempted, again and again, with each prompt alone; return the
    answers."""
    data = options["data_parallel_size"]
    said = ranks_say(options, devices, SCRIPT, late)
    expected = said["alone"]
    for name in ("crowd", "again", "forgotten"):
        found, stats = said[name]
        assert_equal(found, expected, atol)
        assert stats["num_preemptions"] > 0 and stats["host_blocks_loaded"] > 2, (name, stats)
        if data == 1:  # else a prompt may go to the replica that has not seen it
            assert (stats["external_cache_hits"] > 0) == (name == "again"), (name, stats)
        assert not stats["host_blocks_dropped"], (name, stats)
    assert len(said["aborted"]) >= 2
    for index, answer in said["aborted"].items():
        assert_equal([answer], [expected[int(index)]], atol)
    return expected


def assert_equal(answers, expected, atol):
    """These tokens, and their logprobs to the bit or nearly."""
    for (tokens, logprobs), its in zip(answers, expected, strict=True):
        assert tokens == its[0]
        mine, others = (np.concatenate(one) for one in (logprobs, its[1]))
        np.testing.assert_allclose(mine, others, rtol=0, atol=atol)
