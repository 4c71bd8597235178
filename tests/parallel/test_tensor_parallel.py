"""A model cut over devices computes what it computes on one.

The virtual CPU devices need a process of their own: JAX counts devices once.
"""

import json
import subprocess
import sys

import numpy as np
import pytest

from jaxllm.testing import make_tiny_checkpoint

# More shards than kv heads, an odd vocabulary, fused weights with biases, normalised heads.
MODELS = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 387},
    "qwen2": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
}

SCRIPT = """
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
from jaxllm import LLM, SamplingParams

import jax.numpy as jnp
from jaxllm import LLM, SamplingParams
from jaxllm.sampling.logits_processor import LogitsProcessor

class Favour(LogitsProcessor):
    "Prefers tokens by a table as wide as the vocabulary, which padding must not reach."
    def encode(self, params):
        return () if params.extra_args else None
    def apply(self, logits, params, output_index):
        return logits + jnp.arange(VOCAB) % 7

model, variants = sys.argv[1], json.loads(sys.argv[2])
VOCAB = json.load(open(model + "/config.json"))["vocab_size"]
rng = __import__("random").Random(0)
prompts = [[rng.randrange(300) for _ in range(length)] for length in (1, 7, 33, 70, 40, 12, 9)]
params = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=3),
    SamplingParams(temperature=1, top_p=0.9, top_k=40, seed=3, max_tokens=20, logprobs=3),
    SamplingParams(seed=1, max_tokens=8, prompt_logprobs=2, logprobs=0),
    SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1.3, logprobs=1),
    SamplingParams(seed=4, max_tokens=12, allowed_token_ids=list(range(5, 90)), logprobs=1),
    SamplingParams(seed=5, max_tokens=12, min_p=0.05, logit_bias={7: 4.0}, n=2, logprobs=1),
    SamplingParams(seed=6, max_tokens=12, extra_args={"favour": 1}, logprobs=1),
]
base = dict(
    dtype="float32", max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32, block_size=8,
    kv_cache_memory_bytes=1 << 20, skip_tokenizer_init=True, enforce_eager=True,
    logits_processors=(Favour,),
)

def answers(options):
    llm = LLM(model, **{**base, **options})
    return [
        {
            "tokens": list(completion.token_ids),
            "logprobs": [
                position[token].logprob
                for token, position in zip(completion.token_ids, completion.logprobs)
            ],
            "prompt_logprobs": [
                [entry.logprob for entry in position.values()]
                for position in (output.prompt_logprobs or [])[1:]
            ],
        }
        for output in llm.generate(prompts, params, use_tqdm=False)
        for completion in output.outputs
    ]

print(json.dumps([answers(options) for options in variants]))
"""


def run(model_dir, *variants):
    """What an engine with each of these options answers."""
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model_dir), json.dumps(variants)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


def assert_equal(got, expected):
    assert [a["tokens"] for a in got] == [a["tokens"] for a in expected]
    for mine, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine["logprobs"], other["logprobs"], atol=1e-4)
        for one, two in zip(mine["prompt_logprobs"], other["prompt_logprobs"], strict=True):
            np.testing.assert_allclose(one, two, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes"), [("llama", (2, 4, 8)), ("qwen2", (4,)), ("qwen3", (8,))]
)
def test_any_number_of_shards_gives_the_same_tokens(family, sizes, tmp_path):
    model_dir = make_tiny_checkpoint(tmp_path, family, **MODELS[family])
    one, *more = run(model_dir, {}, *({"tensor_parallel_size": size} for size in sizes))
    for answers in more:
        assert_equal(answers, one)


@pytest.mark.slow
def test_equalities_of_the_engine_hold_for_two_shards(tmp_path):
    model_dir = make_tiny_checkpoint(tmp_path, "llama", **MODELS["llama"])
    changes = (
        {},
        {"async_scheduling": False, "max_num_seqs": 2},
        {"enable_prefix_caching": False, "num_gpu_blocks_override": 24},
        {"attention_backend": "reference", "block_size": 16},
    )
    plain, *others = run(model_dir, *({"tensor_parallel_size": 2, **change} for change in changes))
    for answers in others:
        assert_equal(answers, plain)
