"""An engine cut over devices, and its replicas, see what one on one device sees."""

import json
import subprocess
import sys

import pytest

from tests.media.models import (
    OPTIONS,
    make_gemma3,
    make_gemma4,
    make_internvl,
    make_qwen3_5_moe,
    make_qwen3_moe,
)

pytest.importorskip("PIL")

# The devices of a process are counted once, so it is another one.
SCRIPT = """
import json, os, sys
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
os.environ["JAX_PLATFORMS"] = "cpu"

from jaxllm import LLM, SamplingParams
from tests.media.models import picture

images = [[picture(64, 64)], [picture(30, 50, 1), picture(9, 3, 2)], [picture(64, 64)]]
prompts = [
    {"prompt": "Look: " + sys.argv[2] * len(its), "multi_modal_data": {"image": its}}
    for its in images
]
params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0)
found = []
for options in json.loads(sys.argv[1]):
    llm = LLM(**options)
    answers = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    found.append([(one.token_ids, one.cumulative_logprob) for one in answers])
    llm.shutdown()
print(json.dumps(found))
"""
WAYS = ["tensor_parallel_size", pytest.param("data_parallel_size", marks=pytest.mark.sweep)]
# With positions in rows and columns, states, experts, and outputs for the first layers.
QWENS = {"qwen3-moe": make_qwen3_moe, "qwen3.5-moe": make_qwen3_5_moe}
MARK = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.mark.parametrize("way", WAYS)
def test_answers_do_not_depend_on_the_devices(way, vision_model):
    one = compare(vision_model, way, "[IMG]")
    assert one[0] == one[2] != one[1]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", QWENS)
def test_answers_of_qwen_do_not_either(kind, tmp_path):
    one = compare(QWENS[kind](tmp_path), "tensor_parallel_size", MARK)
    tokens = [tokens for tokens, _ in one]
    assert tokens[0] == tokens[2] != tokens[1]


@pytest.mark.sweep
def test_answers_of_gemma_do_not_either(tmp_path):
    one = compare(make_gemma3(tmp_path), "tensor_parallel_size", "<start_of_image>")
    assert one[0][0] == one[2][0] and one[0] != one[1]


@pytest.mark.sweep
def test_answers_of_gemma_4_do_not_either(tmp_path):
    model = make_gemma4(tmp_path)
    one = compare(model, "tensor_parallel_size", "<|image|>", max_num_batched_tokens=80)
    assert one[0][0] == one[2][0] and one[0] != one[1]


@pytest.mark.sweep
@pytest.mark.parametrize("num_heads", [2, 3])
def test_answers_of_internvl_do_not_either(tmp_path, num_heads):
    """With a norm over the heads of all devices, in its tower, or one that cannot be cut."""
    vision = {"use_qk_norm": True, "norm_type": "rms_norm", "num_attention_heads": num_heads}
    model = make_internvl(tmp_path, vision=vision)
    one = compare(model, "tensor_parallel_size", "<IMG_CONTEXT>")
    assert one[0][0] == one[2][0] and one[0] != one[1]


def compare(model, way, mark, **more):
    """Compare the answers of one device and of two, and return those of one."""
    options = OPTIONS | {"model": str(model)} | more
    variants = json.dumps([options, options | {way: 2}])
    run = [sys.executable, "-c", SCRIPT, variants, mark]
    done = subprocess.run(run, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    one, *others = json.loads(done.stdout.splitlines()[-1])
    for other in others:
        for (tokens, logprob), (wanted, of_wanted) in zip(other, one, strict=True):
            assert tokens == wanted and abs(logprob - of_wanted) < 1e-3
    return one
