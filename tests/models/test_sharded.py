"""Models cut over devices compute what they compute on one: the first case of every family, further
cases for what no first case has, and numbers of heads that are not powers of two.

The cases are those of golden.json. With four devices, kv heads are repeated. The models run in a
process of their own, since JAX counts devices once.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxllm.models.architecture import read_architecture
from jaxllm.models.registry import family_names
from jaxllm.testing import tiny_config

CASES = json.loads(Path(__file__).with_name("golden.json").read_text())
FIRST = {case["family"]: case for case in reversed(CASES.values())}
# With parts that no first case has; the test below says which are missing here.
FURTHER = (
    "gemma4-dense-values-are-keys",
    "gemma4-sizes-by-layer",
    "gemma4-experts-beside-mlp",
    "gemma4-mqa-biases-odd-sizes-untied",
    "deepseek-v3-plain-queries-biases-halves-tied",
    "deepseek-v2-lite-plain-queries-mlp-biases",
    "mistral4-no-groups-all-sparse-halves",
    "falcon-h1-norm-first-biases",
    "falcon-h1-no-norm",
    "mamba2-one-group-biases-tied",
    "nemotron-3-super-latent-biases-types",
)
# Norms over all of six heads. Three kv heads are in two devices each, and one is in three or six.
_SIX = {"num_attention_heads": 6, "hidden_size": 96, "intermediate_size": 96}
SIX_HEADS = {
    "olmo3-three-kv-heads": FIRST["olmo3"]["config"] | _SIX | {"num_key_value_heads": 3},
    "olmo2-one-kv-head": _SIX | {"num_key_value_heads": 1},
}
# Every other case is cut in two, the others in four; the sweep cuts them the other way.
_EITHER = {name: FIRST[name] for name in family_names()} | {name: CASES[name] for name in FURTHER}
_TWO_OR_FOUR = {name: [2, 4][place % 2] for place, name in enumerate(_EITHER)}
# Name -> family, seed, config, prompt, and the numbers of devices.
CUT = {name: case | {"num_shards": (_TWO_OR_FOUR[name],)} for name, case in _EITHER.items()} | {
    name: {"family": name.partition("-")[0], "seed": 0, "config": config, "num_shards": (3, 6)}
    | {"prompt": FIRST["llama"]["prompt"]}
    for name, config in SIX_HEADS.items()
}
CUT_THE_OTHER_WAY = {
    name: case | {"num_shards": (6 - _TWO_OR_FOUR[name],)} for name, case in _EITHER.items()
}
SCRIPT = """
import os, sys
os.environ["JAX_NUM_CPU_DEVICES"] = "6"
os.environ["JAX_PLATFORMS"] = "cpu"

import json
from pathlib import Path
import numpy as np
from jaxllm.testing import make_tiny_checkpoint
from tests.models.conftest import SingleRow

cases, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
for name, case in cases.items():
    model_dir = make_tiny_checkpoint(
        folder / name, case["family"], seed=case["seed"], **case["config"]
    )
    logits = {
        str(num_shards): SingleRow(
            model_dir, num_shards=num_shards, num_blocks=max(16, -(-len(case["prompt"]) // 4))
        ).logits(case["prompt"])
        for num_shards in (1, *case["num_shards"])
    }
    np.savez(folder / name / "logits.npz", **logits)
"""


def compute(cases, folder):
    """Name -> number of devices -> logits [T, V], with columns of padding."""
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(cases), str(folder)],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return {name: np.load(folder / name / "logits.npz") for name in cases}


@pytest.fixture(scope="module")
def logits(tmp_path_factory):
    return compute(CUT, tmp_path_factory.mktemp("sharded"))


@pytest.fixture(scope="module")
def logits_cut_the_other_way(tmp_path_factory):
    return compute(CUT_THE_OTHER_WAY, tmp_path_factory.mktemp("sharded"))


def each_cut(cases):
    pairs = [(name, num) for name, case in cases.items() for num in case["num_shards"]]
    return pytest.mark.parametrize(("name", "num_shards"), pairs)


@each_cut(CUT)
def test_logits_do_not_depend_on_the_number_of_devices(logits, name, num_shards):
    assert_equal(logits, name, num_shards)


@pytest.mark.sweep
@each_cut(CUT_THE_OTHER_WAY)
def test_logits_do_not_depend_on_the_other_number(logits_cut_the_other_way, name, num_shards):
    assert_equal(logits_cut_the_other_way, name, num_shards)


def assert_equal(logits, name, num_shards):
    whole, cut = logits[name]["1"], logits[name][str(num_shards)]
    assert np.isneginf(cut[:, whole.shape[1] :]).all()
    np.testing.assert_allclose(cut[:, : whole.shape[1]], whole, atol=1e-4, rtol=0)


def parts_of(spec):
    """What a record and those inside are made of: its classes, and which fields are set. Numbers
    and names of functions count as set, since they do not matter to a cut."""
    found = set()
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if not field.compare or field.name == "rope":  # it is the same for all heads
            continue
        for one in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(one):
                found |= parts_of(one)
            is_choice = one is None or isinstance(one, bool | type) or field.name == "kv"
            found.add((type(spec).__name__, field.name, one if is_choice else type(one).__name__))
    return found


def test_every_part_of_a_model_is_cut_in_some_case():
    def parts(cases):
        configs = (tiny_config(case["family"]) | case["config"] for case in cases)
        read = [read_architecture(config | {"dtype": "float32"}) for config in configs]
        return {part for architecture in read for part in parts_of(architecture)}

    missing = parts(CASES.values()) - parts(CUT.values())
    assert not missing
