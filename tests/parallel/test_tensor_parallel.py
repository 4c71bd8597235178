"""A model cut over devices computes what it computes on one."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from jaxllm.testing import make_tiny_checkpoint
from tests.heads import make_eagle

# One engine, one of eight shards, and one of two that takes other ways, all at once: it drafts by a
# head, does not overlap, and has few blocks.
ONE = {}
SHARDS = {size: {"tensor_parallel_size": size} for size in (2, 8)}
FEW_BLOCKS = {"enable_prefix_caching": False, "block_size": 4, "num_gpu_blocks_override": 36}
PLAIN_FEW_BLOCKS = FEW_BLOCKS | {"async_scheduling": False}
SWEPT_WAYS = {
    "two": {},
    "plain, few blocks": PLAIN_FEW_BLOCKS,
    "plain": {"async_scheduling": False},
    "alone": {"max_num_seqs": 1},
    "few blocks": FEW_BLOCKS,
    "reference": {"attention_backend": "reference", "block_size": 16},
    "whole": {"max_num_batched_tokens": 128, "enable_chunked_prefill": False},
    "drafts": {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}},
}

HEAD_DRAFTS = "a head drafts, plain, few blocks"


@pytest.fixture(scope="module")
def answered(engines, sharded_model, tmp_path_factory):
    """What each of them answers, by the name of the way."""
    head = make_eagle(
        tmp_path_factory.mktemp("heads") / "head",
        sharded_model,
        "eagle3",
        draft_vocab_size=100,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
    )
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    other_ways = SHARDS[2] | PLAIN_FEW_BLOCKS | {"speculative_config": drafts}
    variants = {"one": ONE, "eight": SHARDS[8], HEAD_DRAFTS: other_ways}
    return dict(
        zip(variants, engines(sharded_model, *variants.values(), favours=True), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eight", HEAD_DRAFTS])
def test_any_number_of_shards_gives_the_same_tokens(answered, same_answers, way):
    same_answers(answered[way], answered["one"])


@pytest.mark.slow
@pytest.mark.sweep
def test_more_equalities_hold_for_two_shards(engines, sharded_model, same_answers):
    drafts = {"method": "draft_model", "model": str(sharded_model), "num_speculative_tokens": 3}
    ways = SWEPT_WAYS | {"itself drafts": {"speculative_config": drafts}}
    its = engines(sharded_model, ONE, *(SHARDS[2] | way for way in ways.values()))
    expected, *answers = its
    for answer in answers:
        same_answers(answer, expected)
    metrics = {way: answer["metrics"] for way, answer in zip(ways, answers, strict=True)}
    assert metrics["few blocks"]["num_preemptions"] > 0
    assert metrics["drafts"]["spec_decode_num_draft_tokens"] > 0
    assert not metrics["plain"]["overlap"]
    its = metrics["itself drafts"]
    right, drafted = (its[f"spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft"))
    assert right == drafted > 0


@pytest.mark.slow
def test_its_engines_took_other_ways(answered):
    metrics = {way: answer["metrics"] for way, answer in answered.items()}
    assert metrics["eight"]["overlap"] and not metrics[HEAD_DRAFTS]["overlap"]
    assert metrics[HEAD_DRAFTS]["num_preemptions"] > 0
    assert metrics[HEAD_DRAFTS]["spec_decode_num_draft_tokens"] > 0


# The emulator of GPUs does not tell devices apart, so this is for the kernels of TPUs only.
ON_EMULATED_KERNELS = """
import json, os, sys
os.environ["JAX_NUM_CPU_DEVICES"] = "2"
os.environ["JAX_PLATFORMS"] = "cpu"

from jaxllm_kernels.ragged_paged_attention.api import register_backend
from jaxllm_kernels.ragged_paged_attention.tpu import TpuBackend
from jaxllm import LLM, SamplingParams
from tests.emulator import improve_the_emulator

improve_the_emulator()
heads = set()

class Emulated(TpuBackend):
    def attend(self, q, k, *operands, **options):
        heads.add((q.shape[1], k.shape[1]))
        return super().attend(q, k, *operands, **options)

register_backend(Emulated(name="emulated", chip="v5e", interpret=True))

def answers(**options):
    llm = LLM(
        sys.argv[1], dtype="float32", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16,
        block_size=8, num_gpu_blocks_override=12, skip_tokenizer_init=True, enforce_eager=True,
        # What calls Python cannot be stored, and on two devices JAX dies of trying.
        native_kernels=False, compilation_cache_dir="", **options,
    )
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
    # A prompt of two chunks, and one beside its second.
    outputs = llm.generate([list(range(5, 26)), list(range(30, 35))], params, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return [
        [c.token_ids for c in completions],
        [[p[t].logprob for t, p in zip(c.token_ids, c.logprobs)] for c in completions],
    ]

one = answers(attention_backend="xla")
two = answers(attention_backend="emulated", tensor_parallel_size=2)
print(json.dumps([one, two, list(heads)]))
"""


@pytest.mark.slow
def test_emulated_kernels_on_two_shards_answer_as_xla_on_one(tmp_path):
    model = make_tiny_checkpoint(
        tmp_path, "llama", num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    done = subprocess.run(
        [sys.executable, "-c", ON_EMULATED_KERNELS, str(model)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two, heads = json.loads(done.stdout.splitlines()[-1])
    assert heads == [[2, 1]]  # a kernel has half of each kind
    assert two[0] == one[0]
    np.testing.assert_allclose(two[1], one[1], atol=1e-5)
