"""A model cut over devices computes what it computes on one."""

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes"), [("llama", (2, 4, 8)), ("qwen2", (4,)), ("qwen3", (8,))]
)
def test_any_number_of_shards_gives_the_same_tokens(engines, same_answers, family, sizes, tmp_path):
    model_dir = make_tiny_checkpoint(tmp_path, family, **MODELS[family])
    one, *more = engines(model_dir, {}, *({"tensor_parallel_size": size} for size in sizes))
    for other in more:
        same_answers(other, one)


@pytest.mark.slow
def test_equalities_of_the_engine_hold_for_two_shards(engines, same_answers, tmp_path):
    model_dir = make_tiny_checkpoint(tmp_path, "llama", **MODELS["llama"])
    changes = (
        {},
        {"async_scheduling": False, "max_num_seqs": 2},
        {"enable_prefix_caching": False, "num_gpu_blocks_override": 24},
        {"attention_backend": "reference", "block_size": 16},
        {"max_num_batched_tokens": 128, "enable_chunked_prefill": False},
        {"max_num_seqs": 1},
    )
    plain, *others = engines(model_dir, *({"tensor_parallel_size": 2, **c} for c in changes))
    for other in others:
        same_answers(other, plain)


# The emulator of GPUs does not tell devices apart, so this is for the kernels of TPUs only.
ON_EMULATED_KERNELS = """
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

from jaxllm_kernels.ragged_paged_attention.api import register_backend
from jaxllm_kernels.ragged_paged_attention.tpu import TpuBackend
from jaxllm import LLM, SamplingParams

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
    model = make_tiny_checkpoint(tmp_path, "llama", num_attention_heads=4, num_key_value_heads=2)
    done = subprocess.run(
        [sys.executable, "-c", ON_EMULATED_KERNELS, str(model)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two, heads = json.loads(done.stdout.splitlines()[-1])
    assert heads == [[2, 1]]  # a kernel has half of each kind
    assert two[0] == one[0]
    np.testing.assert_allclose(two[1], one[1], atol=1e-5)
