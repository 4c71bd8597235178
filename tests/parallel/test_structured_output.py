"""Answers under a grammar, over several devices and hosts: those of one device, to the token."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from jaxllm.testing import make_tiny_checkpoint
from tests.grammars import Answer, same
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
    return answers, stats.num_preemptions

import msgspec
print("said", msgspec.json.encode([run(options) for options in json.loads(sys.argv[1])]).decode())
"""
BASE = SHARDED | {"skip_tokenizer_init": False}
VARIANTS = {
    "one": {},
    "shards": {"tensor_parallel_size": 2},
    "shards that draft": {
        "tensor_parallel_size": 2,
        "speculative_config": {"method": "ngram", "prompt_lookup_min": 1},
    },
    "stages": {"pipeline_parallel_size": 2, "check_invariants": True},
    "stages without overlap": {"pipeline_parallel_size": 2, "async_scheduling": False},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model"), **SHARDED_MODEL))


def start(variants, num_devices):
    # Gloo starves with two devices and as many threads.
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PJRT_NPROC": "16"}
    env["JAX_NUM_CPU_DEVICES"] = str(num_devices)
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(variants)],
        cwd=ROOT,
        env=env | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def said(process):
    """The answers of each engine, and how often it preempted a request."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    [line] = [line for line in out.splitlines() if line.startswith("said ")]
    return msgspec.json.decode(line.removeprefix("said "), type=list[tuple[dict[str, Answer], int]])


@pytest.fixture(scope="module")
def answered(model_dir):
    variants = [BASE | {"model": model_dir} | options for options in VARIANTS.values()]
    return dict(zip(VARIANTS, said(start(variants, num_devices=2)), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "one"])
def test_devices_give_the_answers_of_one(answered, name):
    (answers, _), (expected, _) = answered[name], answered["one"]
    assert {answer.finish for answer in expected.values()} == {"stop", "length"}
    same(answers, expected, atol=1e-4)


@pytest.mark.slow
def test_hosts_give_the_answers_of_one(model_dir, answered):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = BASE | {"model": model_dir, "tensor_parallel_size": 2, "nnodes": 2}
    ranks = [
        start([options | {"node_rank": rank, "master_port": port}], num_devices=1)
        for rank in range(2)
    ]
    try:
        [(answers, _)] = said(ranks[0])
        _, err = ranks[1].communicate(timeout=120)
        assert ranks[1].returncode == 0, err[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
    same(answers, answered["one"][0], atol=1e-3)
