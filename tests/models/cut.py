"""Models that are cut over devices: cases that together have every part of a model, and every form
that checkpoints have for its weights, which test_sharded.py makes sure of, and numbers of heads
that are not powers of two. A sweep has the first case of every family.

The cases are those of golden.json. With four devices, kv heads are repeated. The models run in a
process of their own, since JAX counts devices once; what they compute on one device is computed in
test_parity.py anyway.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from jaxllm.models.registry import family_names

CASES = json.loads(Path(__file__).with_name("golden.json").read_text())
FIRST = {case["family"]: name for name, case in reversed(CASES.items())}
# With parts that no first case has.
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
    "olmo3-three-kv-heads": CASES[FIRST["olmo3"]]["config"] | _SIX | {"num_key_value_heads": 3},
    "olmo2-one-kv-head": _SIX | {"num_key_value_heads": 1},
}
# Every part of a model is in one of these or above, and so is every form in which checkpoints have
# weights that are cut.
_ALWAYS = (
    "llama",
    "gemma2",
    "olmo",
    "glm4",
    "cohere",
    "gpt-neox",
    "gpt2",
    "phi",
    "gemma4",
    "gemma4-experts-beside-mlp",
    "qwen2-moe",
    "gpt-oss",
    "llama4",
    "mimo-v2",
    "deepseek-v3-plain-queries-biases-halves-tied",
    "mistral4",
    "qwen3.5",
    "qwen3-next-biases-types-of-layers-tied",
    "lfm2",
    "lfm2-moe",
    "falcon-h1-norm-first-biases",
    "falcon-h1-no-norm",
    "nemotron-h",
    "nemotron-3-super-latent-biases-types",
    "kimi-linear-other-names-groups",
    "stablelm",
    "deepseek-v2-lite-plain-queries-mlp-biases",
)
# Name -> family, seed, config, prompt, and the numbers of devices: in turn two and four.
CUT = {
    name: CASES[name] | {"num_shards": ([2, 4][place % 2],)} for place, name in enumerate(_ALWAYS)
} | {
    name: {"family": name.partition("-")[0], "seed": 0, "config": config, "num_shards": (3, 6)}
    | {"prompt": CASES[FIRST["llama"]]["prompt"]}
    for name, config in SIX_HEADS.items()
}
_SWEPT = [FIRST[family] for family in family_names()] + [*FURTHER, *_ALWAYS]
CUT_OTHERWISE = {
    name: CASES[name]
    | {"num_shards": tuple({2, 4}.difference(CUT[name]["num_shards"] if name in CUT else ()))}
    for name in _SWEPT
}
SCRIPT = """
import os, sys
os.environ["JAX_NUM_CPU_DEVICES"] = "6"
os.environ["JAX_PLATFORMS"] = "cpu"

import json
from pathlib import Path
import numpy as np
from jaxllm.errors import ValidationError
from jaxllm.testing import make_tiny_checkpoint
from tests.models.conftest import SingleRow

cases, folder = json.loads(sys.argv[1]), Path(sys.argv[2])

def logits(model_dir, prompt, num_shards):
    num_blocks = max(16, -(-len(prompt) // 4))
    try:
        return SingleRow(model_dir, num_shards=num_shards, num_blocks=num_blocks).logits(prompt)
    except ValidationError as error:
        assert error.parameter == "tensor_parallel_size", error
        return str(error)  # the test says whether this may be

for name, case in cases.items():
    model_dir = make_tiny_checkpoint(
        folder / name, case["family"], seed=case["seed"], **case["config"]
    )
    of_cuts = {str(num): logits(model_dir, case["prompt"], num) for num in case["num_shards"]}
    np.savez(folder / name / "logits.npz", **of_cuts)
"""


def compute(cases, folder):
    """Name -> number of devices -> logits [T, V], with columns of padding, or a refusal."""
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(cases), str(folder)],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return {name: np.load(folder / name / "logits.npz") for name in cases}
