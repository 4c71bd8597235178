"""Blocks of an engine over several hosts go to the memory of each, and come back to where they
were, also on a host that is late."""

import json

import numpy as np
import pytest

from jaxllm.testing import make_tiny_checkpoint
from tests.executor.test_multihost import Ranks
from tests.profile import OVER_HOSTS, SHARDED_MODEL

# What a rank runs. A late rank copies nothing to its memory before it has waited.
SCRIPT = """
import json, sys, time
from jaxllm import LLM, SamplingParams
from jaxllm.offload.host_blocks import HostBlocks
from jaxllm.plan import snapshots

options, prompts, late = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
if str(options["node_rank"]) == late:
    fill = HostBlocks.fill
    HostBlocks.fill = lambda *args: (time.sleep(0.3), fill(*args))
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

def generate():
    before = llm.llm_engine.stats()
    found = answers(llm.generate(prompts, params, use_tqdm=False))
    its = llm.llm_engine.stats()
    names = "num_preemptions", "host_blocks_loaded", "external_cache_hits", "host_blocks_dropped"
    return found, {name: getattr(its, name) - getattr(before, name) for name in names}

def alone(prompt, its):
    llm.reset_prefix_cache()
    return answers(llm.generate([prompt], its, use_tqdm=False))[0]

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
print("said", json.dumps(said), flush=True)
"""

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
    ("model", "tensor", "data", "late"),
    [
        pytest.param(CONVOLUTIONS, 2, 1, "1", id="states"),
        pytest.param(WHOLE, 2, 1, "0", id="rank 0 late", marks=pytest.mark.sweep),
        pytest.param(WINDOWS, 2, 1, "1", id="windows", marks=pytest.mark.sweep),
        # A replica of which rank 0 has nothing.
        pytest.param(CONVOLUTIONS, 1, 2, "1", id="replicas", marks=pytest.mark.sweep),
    ],
)
def test_preemption_changes_no_bit(model, tensor, data, late, tmp_path):
    compare(tmp_path, model, 1, tensor, data, late, atol=0)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("model", "devices", "tensor"),
    [
        pytest.param(DELTA_NETS, 1, 2, id="delta nets"),
        # Each kv head is on two devices, of one host. Sums over all four have other last bits in a
        # crowd, without a second home, too, but not in one process.
        pytest.param(WHOLE, 2, 4, id="four shards"),
    ],
)
def test_where_a_crowd_changes_the_last_bits_preemption_changes_no_others(
    model, devices, tensor, tmp_path
):
    compare(tmp_path, model, devices, tensor, 1, "1", atol=1e-4)


def compare(tmp_path, model, devices, tensor, data, late, atol):
    """Compare a crowd that is preempted, again and again, with each prompt alone."""
    fields, needed = model
    path = make_tiny_checkpoint(tmp_path, **fields)
    options = OVER_HOSTS | FEW | needed | {"model": str(path)}
    options |= {"tensor_parallel_size": tensor, "data_parallel_size": data}
    with Ranks(options, PROMPTS, nnodes=2, devices=devices, then=late, script=SCRIPT) as ranks:
        (status, lines, err), other = ranks.ends()
    assert (status, other[:2]) == (0, (0, [])), (err, other[2])
    said = json.loads(lines[-1])
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


def assert_equal(answers, expected, atol):
    """These tokens, and their logprobs to the bit or nearly."""
    for (tokens, logprobs), its in zip(answers, expected, strict=True):
        assert tokens == its[0]
        mine, others = (np.concatenate(one) for one in (logprobs, its[1]))
        np.testing.assert_allclose(mine, others, rtol=0, atol=atol)
