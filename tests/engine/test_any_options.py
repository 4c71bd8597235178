"""Any options together: an engine refuses them by name, or it answers as a plain one does.

Those of several devices are among them if there are such, as with JAX_NUM_CPU_DEVICES=4.
"""

import math
import random

import jax
import pytest

from jaxllm import LLM, SamplingParams, StructuredOutputsParams, ValidationError
from jaxllm.errors import UnsupportedModelError
from jaxllm.models.registry import family_names
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY

ENGINES = 60
ENCODERS = ("bert", "roberta", "modernbert")
# Options that say what is computed, so the plain engine has them, too. Most engines have none.
WHAT = {
    "quantization": (None, None, None, "int8", "fp8", "int4"),
    "kv_cache_dtype": ("auto", "auto", "auto", "auto", "fp8", "int8"),
    "native_kernels": (True, True, True, True, False),
}
# Options that only say how.
HOW = {
    "max_num_batched_tokens": (8, 16, 32, 64),
    "block_size": (8, 16, 32),
    "max_num_seqs": (2, 4, 8),
    "async_scheduling": (True, True, False),
    "enable_prefix_caching": (True, True, False),
    "long_prefill_token_threshold": (0, 0, 0, 6),
    "scheduling_policy": ("fcfs", "fcfs", "priority"),
    "kv_offloading_size": (None, None, None, 0.01),
    "enable_lora": (False, False, False, True),
    "batch_invariant": (False,) * 9 + (True,),
}
MESHES = (
    *({},) * 6,
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 4},
    {"pipeline_parallel_size": 2},
    {"data_parallel_size": 2},
    {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
)
PARAMS = {
    "temperature": (0, 0, 0.6, 1),
    "ignore_eos": (True, False),
    "top_k": (-1, -1, -1, 20),
    "top_p": (1, 1, 1, 0.8),
    "min_p": (0, 0, 0, 0.05),
    "repetition_penalty": (1, 1, 1, 1.3),
    "frequency_penalty": (0, 0, 0, 0.5),
    "logit_bias": (None, None, None, {10: 3.0, 11: -100.0}),
    "prompt_logprobs": (None, None, None, 1),
}
FORMS = ({"regex": "[a-f]{3,30}x"}, {"choice": ["yes", "no, never"]}, {"json": {"type": "object"}})
NUM_REQUESTS = 7


def draw(rng, choices):
    return {name: rng.choice(values) for name, values in choices.items()}


def ways(rng, checkpoint, family):
    """Options of an engine that answers as a plain one of the same family."""
    meshes = [mesh for mesh in MESHES if math.prod(mesh.values()) <= jax.device_count()]
    how = draw(rng, HOW) | rng.choice(meshes) | {"check_invariants": True}
    # From what a single request needs on.
    blocks = rng.choice((1, 2, 4)) * TINY["max_model_len"] // how["block_size"]
    how["num_gpu_blocks_override"] = blocks + rng.randint(1, 3)
    if rng.random() < 0.15:
        how |= {"enable_chunked_prefill": False, "max_num_batched_tokens": TINY["max_model_len"]}
    method = rng.choice([None, None, None, "ngram", "draft_model", "draft_model", "mtp"])
    if method is not None:
        drafts = {"method": method, "num_speculative_tokens": rng.randint(1, 5)}
        if method == "draft_model":
            # Its own weights draft what is accepted, and others what is not.
            drafts["model"] = checkpoint(rng.choice([family, "llama"]), seed=rng.randint(0, 1))
        how["speculative_config"] = drafts
    return how


def requests(rng):
    """Prompts of many lengths, which may begin alike or repeat themselves, with many parameters."""
    prompts, params = [], []
    for i in range(NUM_REQUESTS):
        ids = rng.choices(range(3, 380), k=rng.choice([1, 2, 5, 16, 17, 33, 60]))
        if rng.random() < 0.4:
            ids = list(range(50, 50 + rng.choice([16, 32, 40]))) + ids[:50]
        if rng.random() < 0.2:
            ids = (ids[:7] * 10)[:64]
        fields = draw(rng, PARAMS)
        if rng.random() < 0.2:
            fields["structured_outputs"] = StructuredOutputsParams(**rng.choice(FORMS))
        if fields["temperature"] and rng.random() < 0.3:
            fields["n"] = 2
        most = rng.randint(4, 24)
        params.append(SamplingParams(**fields, seed=i, logprobs=2, max_tokens=most))
        prompts.append({"prompt_token_ids": ids})
    return prompts, params


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(ENGINES))
def test_options_are_refused_by_name_or_change_no_answer(seed, tmp_path, assert_same):
    rng, llm = random.Random(seed), None

    def checkpoint(family, seed=0):
        path = tmp_path / f"{family}-{seed}"
        return str(path if path.exists() else make_tiny_checkpoint(path, family, seed=seed))

    while llm is None:
        family = rng.choice([name for name in family_names() if name not in ENCODERS])
        model, what, how = checkpoint(family), draw(rng, WHAT), ways(rng, checkpoint, family)
        try:
            llm = LLM(model, **TINY | what | how)
        except (ValidationError, UnsupportedModelError) as error:
            assert any(name in str(error) for name in [*TINY, *what, *how]), error
    prompts, params = requests(rng)
    first = llm.generate(prompts, params, use_tqdm=False)
    # What is cached now is found, if it is still there, and the requests come in another order.
    if rng.random() < 0.3:
        llm.sleep(level=1)
        llm.wake_up()
    order = rng.sample(range(NUM_REQUESTS), NUM_REQUESTS)
    again = llm.generate([prompts[i] for i in order], [params[i] for i in order], use_tqdm=False)

    expected = LLM(model, **TINY | what).generate(prompts, params, use_tqdm=False)
    # A number that is rounded to 8 bits may go the other way.
    atol = 1e-3 if what["kv_cache_dtype"] == "auto" else 2e-2
    assert_same(first, expected, atol=atol)
    assert_same(again, [expected[i] for i in order], atol=atol)
