"""Models that pool, cut over devices: their vectors are those of one device."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.pooling.models import write_model
from tests.profile import TINY

pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

# The devices of a process are counted once, so it is another one.
SCRIPT = """
import json, os, sys
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
os.environ["JAX_PLATFORMS"] = "cpu"

from jaxllm import LLM

prompts = [list(range(4, 4 + size)) for size in (5, 1, 40, 100, 17)]
found = []
for options in json.loads(sys.argv[1]):
    llm = LLM(**options)
    tasks = llm.llm_engine.info.pooling.tasks
    answers = [llm.encode(prompts, pooling_task=task, use_tqdm=False) for task in tasks]
    found.append([output.outputs.data.tolist() for its in answers for output in its])
    llm.shutdown()
print(json.dumps(found))
"""
WAYS = [
    {},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    {"data_parallel_size": 2},
]


@pytest.mark.parametrize(
    "kind",
    ["BertModel", pytest.param("LlamaForSequenceClassification", marks=pytest.mark.sweep)],
)
def test_vectors_do_not_depend_on_the_devices(tmp_path, kind):
    family = "bert" if kind == "BertModel" else "llama"
    path = write_model(tmp_path, kind, family)
    options = TINY | {"model": str(path), "skip_tokenizer_init": True}
    options["max_num_batched_tokens"] = 128
    options["pooler_config"] = {"pooling_type": "MEAN"}
    variants = json.dumps([options | way for way in WAYS])
    run = [sys.executable, "-c", SCRIPT, variants]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    one, *others = json.loads(done.stdout.splitlines()[-1])
    for other in others:
        for want, got in zip(one, other, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)
