"""The first case of every family, cut over devices, computes what it computes on one.

The cases are those of golden.json. With four devices, kv heads are repeated. The models run in a
process of their own, since JAX counts devices once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxllm.models.registry import family_names

CASES = json.loads(Path(__file__).with_name("golden.json").read_text())
NUM_SHARDS = (2, 4)
SCRIPT = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import json
from pathlib import Path
import numpy as np
from jaxllm.testing import make_tiny_checkpoint
from tests.models.conftest import SingleRow

cases, shards, folder = json.loads(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
for family, case in cases.items():
    model_dir = make_tiny_checkpoint(folder / family, family, seed=case["seed"], **case["config"])
    logits = {
        str(num_shards): SingleRow(model_dir, num_shards=num_shards).logits(case["prompt"])
        for num_shards in (1, *shards)
    }
    np.savez(folder / family / "logits.npz", **logits)
"""


@pytest.fixture(scope="module")
def logits(tmp_path_factory):
    """Family -> number of devices -> logits [T, V], with columns of padding."""
    folder = tmp_path_factory.mktemp("sharded")
    first = {case["family"]: case for case in reversed(CASES.values())}
    cases = {family: first[family] for family in family_names()}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(cases), json.dumps(NUM_SHARDS), str(folder)],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return {family: np.load(folder / family / "logits.npz") for family in cases}


@pytest.mark.parametrize("num_shards", NUM_SHARDS)
@pytest.mark.parametrize("family", family_names())
def test_logits_do_not_depend_on_the_number_of_devices(logits, family, num_shards):
    whole, cut = logits[family]["1"], logits[family][str(num_shards)]
    assert np.isneginf(cut[:, whole.shape[1] :]).all()
    np.testing.assert_allclose(cut[:, : whole.shape[1]], whole, atol=1e-4, rtol=0)
