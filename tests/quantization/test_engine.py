"""Engines whose models have codes for weights."""

import json
import subprocess
import sys
from typing import Any, cast

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY
from tests.quantization.checkpoints import FLOAT8, INT8, compressed, write_both

PROMPTS: Any = [{"prompt_token_ids": ids} for ids in ([5, 77, 201, 9], list(range(40, 90)), [7])]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)


def answers(model, **options):
    llm = LLM(**(TINY | {"model": str(model)} | options))
    try:
        outputs = llm.generate(PROMPTS, PARAMS)
    finally:
        llm.shutdown()
    completions = [output.outputs[0] for output in outputs]
    return [c.token_ids for c in completions], [
        cast(float, c.cumulative_logprob) for c in completions
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_our_products_and_those_of_xla_agree(model, quantization):
    tokens, logprobs = answers(model, quantization=quantization)
    by_xla = answers(model, quantization=quantization, native_kernels=False)
    assert tokens == by_xla[0]
    np.testing.assert_allclose(logprobs, by_xla[1], atol=1e-4)
    # The codes are not the weights.
    assert not np.allclose(logprobs, answers(model)[1], atol=1e-4)


def test_made_up_weights_have_codes(model):
    tokens, logprobs = answers(model, quantization="int8", load_format="dummy")
    assert np.isfinite(logprobs).all() and len(set(tokens[1])) > 1


ON_TWO_DEVICES = """
import json, os, sys
os.environ["JAX_NUM_CPU_DEVICES"] = "2"
os.environ["JAX_PLATFORMS"] = "cpu"

from tests.quantization.test_engine import answers
found = [
    [answers(model, tensor_parallel_size=size, skip_tokenizer_init=True) for size in (1, 2)]
    for model in sys.argv[1:]
]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_devices_have_their_share_of_codes_and_scales(tmp_path):
    """A scale for each output, and blocks: of the last one's outputs only a part are there, and its
    inputs are cut."""
    by_output, _ = write_both(tmp_path / "o", compressed("int", "channel"), INT8, (1, None))
    blocks = compressed("float", "block", block_structure=[24, 32])
    by_block, _ = write_both(tmp_path / "b", blocks, FLOAT8, (24, 32))
    done = subprocess.run(
        [sys.executable, "-c", ON_TWO_DEVICES, str(by_output), str(by_block)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for one, two in json.loads(done.stdout.splitlines()[-1]):
        assert one[0] == two[0]
        np.testing.assert_allclose(one[1], two[1], atol=1e-4)
