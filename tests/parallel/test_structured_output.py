"""Answers under a grammar, over several devices: those of one device, to the token. Over several
hosts they are in `executor/test_multihost.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from jaxllm.testing import make_tiny_checkpoint
from tests.grammars import Answer, same
from tests.heads import add_mtp
from tests.profile import SHARDED, SHARDED_MODEL

ROOT = Path(__file__).parents[2]
# Engines one after another, with one model.
SCRIPT = """
import json, sys
from tests.grammars import crowd, make_core, serve

def run(options):
    core = make_core(**options)
    answers = serve(core, crowd())
    stats = core.stats()
    core.shutdown()
    return answers, stats.num_draft_tokens

import msgspec
print("said", msgspec.json.encode([run(options) for options in json.loads(sys.argv[1])]).decode())
"""
BASE = SHARDED | {"skip_tokenizer_init": False}
VARIANTS = {
    "one": {},
    "shards that draft": {
        "tensor_parallel_size": 2,
        "speculative_config": {"method": "ngram", "prompt_lookup_min": 1},
    },
    "stages": {"pipeline_parallel_size": 2, "check_invariants": True},
}
OTHERS = {
    "one": {},
    "shards": {"tensor_parallel_size": 2},
    "stages without overlap": {"pipeline_parallel_size": 2, "async_scheduling": False},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model"), **SHARDED_MODEL))


def run(options):
    """The answers of each engine, and how many drafts it had."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(options)],
        cwd=ROOT,
        env=env | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        text=True,
        capture_output=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("said ")]
    return msgspec.json.decode(line.removeprefix("said "), type=list[tuple[dict[str, Answer], int]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "variants", [VARIANTS, pytest.param(OTHERS, marks=pytest.mark.sweep)], ids=["always", "swept"]
)
def test_devices_give_the_answers_of_one(model_dir, variants):
    (expected, _), *others = run(
        [BASE | {"model": model_dir} | options for options in variants.values()]
    )
    assert {answer.finish for answer in expected.values()} == {"stop", "length"}
    for answers, _ in others:
        same(answers, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_shards_with_drafts_of_weights_and_with_states(family, tmp_path):
    model_dir = str(make_tiny_checkpoint(tmp_path, family))
    methods = [{"model": model_dir}]
    if family == "qwen3_5":
        add_mtp(tmp_path)
        methods = [{"method": "custom_class", "model": "tests.drafts:Bigrams"}, {"method": "mtp"}]
    fields = {
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 4, 3]],
    }
    options = BASE | {"model": model_dir}
    shards = options | {"tensor_parallel_size": 2}
    (expected, _), *others = run(
        [options, *(shards | {"speculative_config": one | fields} for one in methods)]
    )
    for answers, num_drafts in others:
        same(answers, expected, atol=1e-4)
        assert num_drafts > 0
