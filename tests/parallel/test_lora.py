"""Adapters are cut as the layers that they change."""

import json
import subprocess
import sys

import numpy as np
import pytest

from jaxllm.testing import make_tiny_adapter, make_tiny_checkpoint
from tests.profile import SHARDED, SHARDED_MODEL

# With four shards kv heads are repeated. Stages have their own parts of an adapter, and replicas
# an adapter each.
WAYS = [{"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "data_parallel_size": 2}]
SWEPT_WAYS = [
    {"tensor_parallel_size": 4},
    {"pipeline_parallel_size": 2, "data_parallel_size": 2},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"data_parallel_size": 2},
]
SCRIPT = """
import json, os, sys
os.environ["JAX_NUM_CPU_DEVICES"] = "16"
os.environ["JAX_PLATFORMS"] = "cpu"
from jaxllm import LLM, LoRARequest, SamplingParams

model, adapters, base, ways = sys.argv[1], *map(json.loads, sys.argv[2:])
loras = [None, *(LoRARequest(path, i, path) for i, path in enumerate(adapters, 1))]
prompts = [[3 + (i * 31 + j) % 300 for j in range(3 + 9 * i)] for i in range(6)]
params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
answers = []
for way in ways:
    llm = LLM(model, **base, **way, enable_lora=True, max_lora_rank=8, max_loras=2)
    outputs = llm.generate(prompts, params, lora_request=loras * 2, use_tqdm=False)
    its = [output.outputs[0] for output in outputs]
    answers.append([(a.token_ids, [p[t].logprob for t, p in zip(a.token_ids, a.logprobs)])
                    for a in its])
    llm.shutdown()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    path = tmp_path_factory.mktemp("lora")
    model = make_tiny_checkpoint(path / "model", **SHARDED_MODEL)
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapters = [
        str(make_tiny_adapter(path / str(i), model, seed=i, rank=3 + i, target_modules=its))
        for i, its in enumerate((layers, layers[1:6:2]))
    ]

    def answer(ways):
        arguments = [str(model), *map(json.dumps, (adapters, SHARDED, ways))]
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT, *arguments], check=True, capture_output=True, text=True
        )
        return json.loads(run.stdout.splitlines()[-1])

    return answer


@pytest.mark.slow
@pytest.mark.parametrize(
    "ways", [WAYS, pytest.param(SWEPT_WAYS, marks=pytest.mark.sweep)], ids=["always", "swept"]
)
def test_every_way_to_cut_a_model_gives_the_same_answers(answer, ways):
    expected, *answered = answer([{}, *ways])
    for answers in answered:
        for (tokens, logprobs), (wanted, its) in zip(answers, expected, strict=True):
            assert tokens == wanted
            np.testing.assert_allclose(logprobs, its, atol=1e-4)
    # Adapters change answers.
    plain, one, other = (tokens for tokens, _ in expected[:3])
    assert plain != one != other != plain
