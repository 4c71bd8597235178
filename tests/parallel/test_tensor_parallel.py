"""A model cut over devices computes what it computes on one."""

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
