"""Replicas of a model serve one stream of requests, with the tokens of a single engine."""

import json
import subprocess
import sys

import pytest

from tests.profile import SHARDED

SCRIPT = """
import json, os, sys
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
from jaxllm import LLM, SamplingParams
from jaxllm.errors import ValidationError
from jaxllm.metrics.reader import Histogram

base = json.loads(sys.argv[2]) | {"model": sys.argv[1]}
prompts = [[3 + (i * 31 + j) % 300 for j in range(2 + 3 * i)] for i in range(8)]
params = [SamplingParams(seed=i, max_tokens=4 + i, n=1 + i % 2, ignore_eos=True) for i in range(8)]

def tokens(llm):
    global outputs
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[c.token_ids for c in output.outputs] for output in outputs]

def metrics(llm):
    "Of both replicas."
    found = {}
    for metric in llm.get_metrics():
        if not isinstance(metric, Histogram):
            found.setdefault(metric.name, []).append(metric.value)
    return found

one = tokens(LLM(**base))
shards = int(sys.argv[3])
llm = LLM(**base, data_parallel_size=2, tensor_parallel_size=shards)
assert tokens(llm) == one, shards
finished = metrics(llm)["jaxllm:engine_answers_finished"]
assert min(finished) > 0 and sum(finished) == sum(len(row) for row in one)
assert metrics(llm)["jaxllm:kv_blocks_used"] == [0, 0]
assert llm.llm_engine.stats().num_requests_finished == sum(finished)
replicas = {output.metrics.replica for output in outputs}
assert replicas == {0, 1}
# Both have worked: each has its cache on devices of its own.
used = {shard.device for array in jax.live_arrays() for shard in array.addressable_shards}
assert len(used) >= 2 * shards, used

# Aborted wherever it is; the others go on.
ids = llm.enqueue(prompts, params)
llm.llm_engine.abort_request(ids[3])
reasons = [o.outputs[0].finish_reason for o in llm.wait_for_completion(use_tqdm=False)]
assert reasons == ["length"] * 3 + ["abort"] + ["length"] * 4, reasons
assert llm.reset_prefix_cache()

try:
    LLM(**base, data_parallel_size=3, tensor_parallel_size=2)
except ValidationError as error:
    assert "want 6 devices, and there are 4" in str(error), error
else:
    raise AssertionError("three replicas of two on four devices")
print("well")
"""


@pytest.mark.slow
@pytest.mark.parametrize("shards", ["1", pytest.param("2", marks=pytest.mark.sweep)])
def test_replicas_give_the_tokens_of_one_engine(sharded_model, shards):
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(sharded_model), json.dumps(SHARDED), shards],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.stdout.strip().endswith("well"), process.stderr[-3000:]
