"""On a GPU a step is one launch of one graph, which nothing builds again while steps go on."""

import subprocess
import sys
from collections import Counter

import jax
import pytest
from jaxllm_kernels.platform import chip_of

# In a process of its own: XLA reads its flags once. A profile would otherwise be without graphs.
ENGINE = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_enable_command_buffers_during_profiling=true"
import jax
from pathlib import Path
from jaxllm import LLM, SamplingParams
from jaxllm.testing import make_tiny_checkpoint

folder, graphs = Path(sys.argv[1]), sys.argv[2]
model = make_tiny_checkpoint(folder / "model")
llm = LLM(
    str(model), dtype="bfloat16", max_model_len=256, max_num_seqs=4, gpu_graphs=graphs,
    num_gpu_blocks_override=64,
)
params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
prompts = [{"prompt_token_ids": [7, 8, 9]}] * 4
llm.generate(prompts, params)  # whatever is built in the beginning
jax.profiler.start_trace(str(folder / "trace"))
llm.generate(prompts, params)
jax.profiler.stop_trace()
(trace,) = (folder / "trace").rglob("*.xplane.pb")
for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
    for line in plane.lines:
        for event in line.events:
            print("EVENT", event.name)
"""
STEPS = 64  # one of the prompts, and then one for each token


@pytest.fixture
def gpu():
    chip = chip_of(jax.devices()[0])
    if chip.platform != "gpu":
        pytest.skip(f"needs a GPU, and this is a {chip.name}")


def count_events(folder, graphs) -> Counter[str]:
    run = subprocess.run(
        [sys.executable, "-c", ENGINE, str(folder), graphs],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    lines = (line for line in run.stdout.splitlines() if line.startswith("EVENT "))
    return Counter(line.removeprefix("EVENT ") for line in lines)


@pytest.mark.gpu
def test_a_step_launches_one_graph_and_builds_none(gpu, tmp_path):
    events = count_events(tmp_path, "whole")
    assert STEPS <= events["cuGraphLaunch"] <= STEPS + 8, events
    assert events["cuGraphInstantiateWithFlags"] + events["cuGraphInstantiate"] <= 2, events
    updates = sum(count for name, count in events.items() if name.startswith("cuGraphExec"))
    assert updates <= STEPS, events


@pytest.mark.gpu
def test_without_graphs_none_is_launched(gpu, tmp_path):
    assert count_events(tmp_path, "off")["cuGraphLaunch"] == 0
