"""An engine that compiles behind its steps answers as one that compiles before them."""

import logging
import subprocess
import sys
import threading
import time

import pytest
from jaxllm_kernels.platform import CHIPS

from jaxllm import LLM, SamplingParams
from jaxllm.cli.main import main
from jaxllm.config import CompilationConfig
from jaxllm.errors import CheckpointError, ValidationError
from jaxllm.plan.gpu_compiler import when_to_compile
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY

BEHIND = TINY | {"enforce_eager": False, "compile_behind": True}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (3, 40, 17)]
# Nothing shuts this engine down: the process ends with programs that nobody has compiled.
ENDS = """
import sys
from jaxllm import LLM, SamplingParams
from tests.engine.test_compile_behind import BEHIND, PARAMS, PROMPTS
llm = LLM(sys.argv[1], compilation_cache_dir=sys.argv[2], **BEHIND)
[answer] = llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False)
print(answer.outputs[0].token_ids)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


def answers(llm):
    return [list(its.outputs[0].token_ids) for its in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(model):
    return answers(LLM(model, **TINY))


def test_answers_are_those_of_an_engine_that_compiles_before(model, expected, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        llm = LLM(model, **BEHIND, compilation_cache_dir=str(tmp_path))
        assert answers(llm) == expected
        assert "now that it is needed" in caplog.text
        deadline = time.monotonic() + 300
        while "all programs are there" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    llm.shutdown()


def test_a_start_that_fails_leaves_no_thread(tmp_path):
    model = make_tiny_checkpoint(tmp_path)
    (model / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError):
        LLM(str(model), **BEHIND)
    assert not [its for its in threading.enumerate() if its.name == "compile behind"]


@pytest.mark.parametrize(("chip", "expected"), [("v6e", "behind"), ("h200", "ahead")])
def test_compilers_that_time_products_compile_before(chip, expected):
    assert when_to_compile(CompilationConfig(compile_behind=True), CHIPS[chip]) == expected


def test_one_prompt_on_the_command_line_does_not_wait_for_all_programs(model, tmp_path, caplog):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    flags.remove("--enforce-eager=True")
    with caplog.at_level(logging.INFO):
        arguments = ["generate", model, "--prompt", "a", "--max-tokens", "1", *flags]
        assert main([*arguments, f"--compilation-cache-dir={tmp_path}"]) == 0
    assert "now that it is needed" in caplog.text


def test_a_process_may_end_before_all_is_compiled(model, expected, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, model, str(tmp_path)], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, f"{expected[0]}\n"), ended.stderr[-2000:]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"enforce_eager": True}, "enforce_eager compiles nothing"),
        ({"nnodes": 2}, "several hosts compile before"),
    ],
)
def test_it_is_refused_with_what_contradicts_it(model, options, reason):
    with pytest.raises(ValidationError, match=f"compile_behind.*{reason}"):
        LLM(model, **BEHIND | options)
