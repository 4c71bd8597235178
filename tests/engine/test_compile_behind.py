"""An engine that compiles behind its steps answers as one that compiles before them."""

import subprocess
import sys

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.errors import ValidationError
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


def test_answers_are_those_of_an_engine_that_compiles_before(model, expected):
    llm = LLM(model, **BEHIND)
    assert answers(llm) == expected
    llm.shutdown()


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
