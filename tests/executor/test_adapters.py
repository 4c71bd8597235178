"""Adapters of an engine over several hosts: each host reads the files itself, and one that cannot
ends the requests for that adapter, and nothing else."""

import json

import pytest

from jaxllm import LLM, LoRARequest, SamplingParams
from jaxllm.testing import make_tiny_adapter, make_tiny_checkpoint
from tests.executor.test_multihost import Ranks
from tests.profile import OVER_HOSTS, SHARDED_MODEL

# What a rank runs. One is late with what it reads, and cannot read the third adapter.
SCRIPT = """
import json, sys, time
from jaxllm import LLM, LoRARequest, SamplingParams
from jaxllm.lora import shelf

options, (prompts, paths, given) = json.loads(sys.argv[1]), json.loads(sys.argv[2])
if str(options["node_rank"]) == sys.argv[3]:
    read = shelf.read_adapter

    def read_late(path, limits):
        time.sleep(0.1)
        if str(path) == paths[2]:
            raise MemoryError("there is none")
        return read(path, limits)

    shelf.read_adapter = read_late
llm = LLM(**options)
params = SamplingParams(**given)

def request(index):
    return None if index is None else LoRARequest(f"adapter {index}", index + 1, paths[index])

def generate(which):
    outputs = llm.generate(prompts, params, lora_request=list(map(request, which)), use_tqdm=False)
    return [
        [a.finish_reason, a.token_ids, [[b.logprob for b in at.values()] for at in a.logprobs]]
        for output in outputs for a in output.outputs
    ]

said = {"alone": [generate([which] * len(prompts)) for which in (None, 0, 1)]}
engine = llm.llm_engine
said["mixed"] = generate([0, 1, None, 1])
said["listed"] = sorted(engine.list_loras())
said["broken"] = generate([2, 0, None, 2])
said["removed"] = [engine.remove_lora(1), sorted(engine.list_loras())]
said["again"] = generate([1, 0, None, 0])
print("said", json.dumps(said), flush=True)
"""
PROMPTS = [
    {"prompt_token_ids": [3 + (n * 131 + i * i * 7 + i) % 380 for i in range(6 + 9 * n)]}
    for n in range(4)
]
PARAMS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}
# Two adapters share one slot.
LORA = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": 8}
# Heads and outputs that are cut, a fused layer, and one that sums over the devices.
LAYERS = ["q_proj", "k_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapters")
    model = make_tiny_checkpoint(path / "model", **SHARDED_MODEL)
    return model, [
        make_tiny_adapter(path / str(seed), model, seed=seed, target_modules=LAYERS)
        for seed in range(3)
    ]


@pytest.fixture(scope="module")
def expected(files):
    """The answers of each adapter, and of none, by an engine on one device."""
    model, paths = files
    options = OVER_HOSTS | LORA | {"model": str(model), "tensor_parallel_size": 1}
    llm = LLM(**options)
    loras = [None, *(LoRARequest(str(n), n + 1, path) for n, path in enumerate(paths[:2]))]
    found = []
    for lora in loras:
        outputs = llm.generate(PROMPTS, SamplingParams(**PARAMS), lora_request=lora, use_tqdm=False)
        found.append([one.outputs[0].token_ids for one in outputs])
    llm.shutdown()
    assert found[0] != found[1] != found[2]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "tensor", "data", "late"),
    [
        (1, 2, 1, "1"),
        pytest.param(1, 2, 1, "0", marks=pytest.mark.sweep),
        pytest.param(2, 4, 1, "1", marks=pytest.mark.sweep),
        # A replica of which rank 0 has nothing.
        pytest.param(1, 1, 2, "1", marks=pytest.mark.sweep),
    ],
)
def test_answers_are_those_of_one_device(devices, tensor, data, late, files, expected):
    model, paths = files
    options = OVER_HOSTS | LORA | {"model": str(model), "check_invariants": True}
    options |= {"tensor_parallel_size": tensor, "data_parallel_size": data}
    given = [PROMPTS, list(map(str, paths)), PARAMS]
    with Ranks(options, given, nnodes=2, devices=devices, then=late, script=SCRIPT) as ranks:
        (status, lines, err), other = ranks.ends()
    assert (status, other[:2]) == (0, (0, [])), (err, other[2])
    said = json.loads(lines[-1])
    alone = said["alone"]
    assert [[tokens for _, tokens, _ in its] for its in alone] == expected
    by_adapter = {None: alone[0], 0: alone[1], 1: alone[2]}
    for name, which in (("mixed", [0, 1, None, 1]), ("again", [1, 0, None, 0])):
        check(said[name], [by_adapter[one][place] for place, one in enumerate(which)])
    assert said["listed"] == [1, 2]
    # With two replicas, that of rank 0 can read what the other cannot.
    broken = said["broken"]
    assert any(one[0] == "error" for one in broken) and (
        data == 2 or [broken[0][0], broken[3][0]] == ["error", "error"]
    )
    check(broken[1:3], [by_adapter[0][1], by_adapter[None][2]])
    assert said["removed"][0] is True and 1 not in said["removed"][1]


def check(found, wanted):
    for (ends, tokens, logprobs), (_, its_tokens, of_them) in zip(found, wanted, strict=True):
        assert (ends, tokens) == ("length", its_tokens)
        for position, its in zip(logprobs, of_them, strict=True):
            assert position == pytest.approx(its, abs=1e-4)
