"""A backend of a user's own reaches every kind of engine, by the name of where it is."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from jaxllm_kernels.ragged_paged_attention.api import get_backend, register_backend
from jaxllm_kernels.ragged_paged_attention.cases import CASES, TOLERANCES, run_case

from jaxllm import LLM, AsyncLLMEngine, SamplingParams, ValidationError
from jaxllm.cli.main import main
from jaxllm.config import EngineArgs
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.identity import foreign_code
from jaxllm.testing import make_tiny_checkpoint
from tests.ports import free_port

NAME = "user_backend:DenseBackend"
# Answers of transformers, with a window in one of two layers.
GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())["qwen2"]
PROMPTS = ["Once upon a time there was a whale", "a", "The answer"]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def can_be_imported():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(Path(__file__).parent)
        yield


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    model = make_tiny_checkpoint(
        tmp_path_factory.mktemp("model"),
        GOLDEN["family"],
        seed=GOLDEN["seed"],
        **GOLDEN["config"],
    )
    return {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 16,
        "num_gpu_blocks_override": 24,
        "enforce_eager": True,
        "native_kernels": False,  # which would be compiled first
    }


@pytest.fixture(scope="module")
def llm(options):
    return LLM(**options, attention_backend=NAME)


@pytest.fixture(scope="module")
def expected(llm):
    """Its answers in the process of the user."""
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case.name in ("mixed", "decodes", "all_padding", "window_of_pages", "everything")
    ],
    ids=lambda case: case.name,
)
def test_the_example_keeps_the_contract(case, dtype):
    result = run_case(get_backend(NAME), case, dtype)
    assert result.all_finite
    assert result.error < TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (NAME, "dense"),
        ("user_backend:make_dense", "dense_made"),
        ("user_backend:dense", "dense_object"),
    ],
)
def test_a_class_a_factory_and_an_object_are_found(spec, name):
    assert get_backend(spec).name == name


def test_it_runs_in_the_process_of_the_user(llm):
    outputs = llm.generate(GOLDEN["prompts"], GREEDY, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert tokens == [golden[:6] for golden in GOLDEN["tokens"]]


@pytest.fixture(scope="module")
def flags(options):
    """The options and the backend, as a user writes them."""
    valued = {name: value for name, value in options.items() if not isinstance(value, bool)}
    return [
        *(f"--{name.replace('_', '-')}={value}" for name, value in valued.items()),
        *("--enforce-eager", "--no-native-kernels", "--attention-backend", NAME),
    ]


def test_it_runs_by_a_flag(flags, expected, capsys):
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    greedy = ["--temperature=0", "--max-tokens=6", "--ignore-eos", "--json"]
    assert main(["generate", *flags, *prompts, *greedy]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["text"] for line in lines] == expected


@pytest.fixture
def server(flags, tmp_path, monkeypatch):
    """`jaxllm serve`, which finds the backend by PYTHONPATH alone: its client, and its log."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "jaxllm.cli.main", "serve", *flags]
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [*command, f"--port={port}", "--served-model-name=tiny"], stderr=stderr
        ) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client,
    ):
        try:
            deadline = time.monotonic() + 300
            while not _is_ready(client):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield client, log
        finally:
            process.kill()


def _is_ready(client):
    try:
        return client.get("/ready").status_code == 200
    except httpx.ConnectError:
        return False


def test_it_runs_in_a_server(server, expected):
    client, log = server
    asked = {"model": "tiny", "prompt": PROMPTS, "ignore_eos": True}
    answer = client.post("/v1/completions", json=asked | {"temperature": 0, "max_tokens": 6})
    assert [choice["text"] for choice in answer.json()["choices"]] == expected
    assert "attention 'dense'" in log.read_text()


def test_it_runs_in_an_engine_process(options, expected):
    async def answer(engine, prompt):
        async for output in engine.generate(prompt, GREEDY, prompt):
            text = output.outputs[0].text
        return text

    async def all_answers(engine):
        return await asyncio.gather(*(answer(engine, prompt) for prompt in PROMPTS))

    engine = AsyncLLMEngine(EngineArgs(**options, attention_backend=NAME))
    try:
        assert asyncio.run(asyncio.wait_for(all_answers(engine), 300)) == expected
    finally:
        engine.shutdown()


def test_a_plan_asks_it_what_it_can_run(options):
    # Only the user's own code could refuse that.
    wrong = options | {"max_model_len": 2048, "num_gpu_blocks_override": 248}
    with pytest.raises(ValidationError, match=f"attention_backend='{NAME}': contexts of 2048"):
        make_plan(EngineArgs(**wrong, attention_backend=NAME))


def test_a_name_registered_here_is_refused_there(options):
    name = "registered_by_a_user"
    register_backend(dataclasses.replace(get_backend(NAME), name=name))
    assert make_plan(EngineArgs(**options, attention_backend=name)).attention.name == name
    with pytest.raises(ValidationError, match=f"attention_backend='{name}'.*'module:name'"):
        AsyncLLMEngine(EngineArgs(**options, attention_backend=name))


def test_programs_with_its_code_are_not_kept(options):
    plan = make_plan(EngineArgs(**options, attention_backend=NAME))
    assert foreign_code(plan) == "user_backend.DenseBackend"


BROKEN = """
class NoBackend:
    name = "none"

class TakesArguments:
    def __init__(self, size): ...

number = 3

class Changing:
    __hash__ = None
    name = cache_head_axis = tuned_for = check = cache_shape = prepare = attend = None
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Nothing", "cannot be imported .No module named 'nowhere'"),
        ("raises_when_imported:Nothing", "cannot be imported .division by zero"),
        ("broken_backend:Nothing", "cannot be imported .*no attribute 'Nothing'"),
        (":DenseBackend", "written as 'module:name'"),
        ("user_backend:", "written as 'module:name'"),
        ("broken_backend:NoBackend", "a NoBackend without cache_head_axis, tuned_for, check"),
        ("broken_backend:number", "a int without name"),
        ("broken_backend:TakesArguments", "cannot be made without arguments .*size"),
        ("broken_backend:Changing", "unhashable type.*frozen dataclass"),
    ],
)
def test_what_is_no_backend_is_refused(name, message, options, tmp_path, monkeypatch):
    (tmp_path / "broken_backend.py").write_text(BROKEN)
    (tmp_path / "raises_when_imported.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValidationError, match=f"^attention_backend='{name}': .*{message}") as told:
        make_plan(EngineArgs(**options, attention_backend=name))
    assert (told.value.parameter, told.value.value) == ("attention_backend", name)


def test_a_colon_is_for_what_is_imported():
    with pytest.raises(ValueError, match="'a:b'.*leave the colon out"):
        register_backend(dataclasses.replace(get_backend(NAME), name="a:b"))
