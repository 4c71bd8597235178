"""Engines on virtual CPU devices. These need a process of their own: JAX counts devices once."""

import json
import subprocess
import sys

import numpy as np
import pytest

from jaxllm.testing import make_tiny_checkpoint
from tests.profile import SHARDED, SHARDED_MODEL

SCRIPT = """
import json, os, sys
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax.numpy as jnp
from jaxllm import LLM, SamplingParams
from jaxllm.metrics.reader import Histogram
from jaxllm.sampling.logits_processor import LogitsProcessor

class Favour(LogitsProcessor):
    "Prefers tokens by a table as wide as the vocabulary, which padding must not reach."
    def encode(self, params):
        return () if params.extra_args else None
    def apply(self, logits, params, output_index):
        return logits + jnp.arange(VOCAB) % 7

model, base, variants, again, favours = sys.argv[1], *map(json.loads, sys.argv[2:])
VOCAB = json.load(open(model + "/config.json"))["vocab_size"]
rng = __import__("random").Random(0)
prompts = [[rng.randrange(300) for _ in range(length)] for length in (1, 7, 33, 70, 40, 12, 9)]
params = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=25, prompt_logprobs=21),
    SamplingParams(temperature=1, top_p=0.9, top_k=40, seed=3, max_tokens=20, logprobs=3),
    SamplingParams(seed=1, max_tokens=8, prompt_logprobs=2, logprobs=0),
    SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1.3, logprobs=1),
    SamplingParams(seed=4, max_tokens=12, allowed_token_ids=list(range(5, 90)), logprobs=1),
    SamplingParams(seed=5, max_tokens=12, min_p=0.05, logit_bias={7: 4.0}, n=2, logprobs=1),
    SamplingParams(seed=6, max_tokens=12, extra_args=favours or None, logprobs=1),
]

def run(options):
    llm = LLM(model, logits_processors=(Favour,) * bool(favours), **{**base, **options})
    answers = [
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
    return {
        "answers": answers,
        "again": run_again(llm) if again else None,
        "expert_tokens": [
            m.value for m in llm.get_metrics() if m.name == "jaxllm:expert_tokens"
        ],
        "metrics": {
            m.name.partition(":")[2]: m.value
            for m in llm.get_metrics()
            if not isinstance(m, Histogram)
        },
    }

def run_again(llm):
    "With what the prefix cache has of the prompts, and an abort on the way."
    engine, ended = llm.llm_engine, {}
    for i, (prompt, p) in enumerate(zip(prompts, params)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, p)
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = [list(c.token_ids) for c in output.outputs]
        steps += 1
        if steps == 6:
            engine.abort_request("3")
    return [tokens for _, completions in sorted(ended.items()) for tokens in completions]

print(json.dumps([run(options) for options in variants]))
"""


def run_engines(model_dir, *variants, again=False, favours=False):
    """What an engine with each of these options answers, and its metrics; once more with `again`,
    from the prefix cache, where one request is aborted. With `favours` they have a logits
    processor, which is foreign code, so that none finds its programs."""
    extra_args = {"favour": 1} if favours else {}
    arguments = [str(model_dir), *map(json.dumps, (SHARDED, variants, again, extra_args))]
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


def assert_same_answers(got, expected):
    """Equal tokens, and logprobs to 1e-4; when run again, equal tokens but for the aborted one."""
    tokens = [answer["tokens"] for answer in got["answers"]]
    assert tokens == [answer["tokens"] for answer in expected["answers"]]
    assert got["again"] in (None, tokens[:3] + tokens[4:])
    for mine, other in zip(got["answers"], expected["answers"], strict=True):
        np.testing.assert_allclose(mine["logprobs"], other["logprobs"], atol=1e-4)
        for one, two in zip(mine["prompt_logprobs"], other["prompt_logprobs"], strict=True):
            np.testing.assert_allclose(one, two, atol=1e-4)


@pytest.fixture(scope="session")
def engines():
    return run_engines


@pytest.fixture(scope="session")
def sharded_model(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("sharded"), **SHARDED_MODEL)


@pytest.fixture(scope="session")
def same_answers():
    return assert_same_answers
