"""Ray starts the ranks: on a real cluster, whose nodes are all on this machine."""

import json
import os
import subprocess
import sys

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import SHARDED, SHARDED_MODEL

SCRIPT = """
import json, sys
import ray
from ray.cluster_utils import Cluster
from jaxllm import LLM, SamplingParams

cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
)
for _ in range(2):
    cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False)
def refused(**options):
    try:
        LLM(sys.argv[1], distributed_executor_backend="ray", **options)
    except ValueError as error:
        print(error)

refused(nnodes=9)
# All nodes, since nothing is said of them.
refused(kv_role="kv_producer", kv_offloading_size=1, kv_secret_file=sys.argv[4])
llm = LLM(
    sys.argv[1], distributed_executor_backend="ray", nnodes=2, tensor_parallel_size=2,
    **json.loads(sys.argv[2])
)
outputs = llm.generate(json.loads(sys.argv[3]), SamplingParams(temperature=0), use_tqdm=False)
print(json.dumps([output.outputs[0].token_ids for output in outputs]), flush=True)
"""

PROMPTS = [[5, 6, 7], list(range(40)), [9] * 17]


@pytest.mark.slow
def test_ray_starts_the_ranks_of_an_engine(tmp_path):
    pytest.importorskip("ray")
    model = str(make_tiny_checkpoint(tmp_path, **SHARDED_MODEL))
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PJRT_NPROC": "16"}
    (tmp_path / "secret").write_text("known to few of us")
    arguments = model, json.dumps(SHARDED), json.dumps(PROMPTS), str(tmp_path / "secret")
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    refusal, of_several, *_, tokens = [
        line for line in done.stdout.splitlines() if line.startswith(("[[", "nn"))
    ]
    assert refusal == "nnodes=9: the Ray cluster has 3 such nodes"
    assert of_several.startswith("nnodes=3: each host has only its part of a block"), of_several
    one = LLM(model, **SHARDED).generate(PROMPTS, SamplingParams(temperature=0), use_tqdm=False)
    assert json.loads(tokens) == [output.outputs[0].token_ids for output in one]
