"""The one tiny engine of the tests.

A test gives these options, and names only what it wants otherwise. Engines of equal options and
equal models have equal programs, and what one has compiled all others find (`build/home_of_tests`).
"""

from typing import Any

# Blocks for twice what its rows can hold, so that only tests that mean to run out of them do. Its
# model is `make_tiny_checkpoint(path)` as it comes.
TINY: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 16,
    "num_gpu_blocks_override": 64,
    "enforce_eager": True,
}

# What is cut over devices or hosts: prompts are ids, any number of logprobs is compared, blocks
# are small, so that a prompt has several, and mixed steps have one shape to compile.
SHARDED: dict[str, Any] = TINY | {
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "num_gpu_blocks_override": 128,
    "skip_tokenizer_init": True,
    "max_logprobs": -1,
}

# The model for it, which has all that is cut in a way of its own: fewer kv heads than shards, heads
# with a norm, fused weights and outputs with biases, a vocabulary that no number of devices
# divides, layers that two stages cannot share evenly, and a window in some of them.
SHARDED_MODEL: dict[str, Any] = {
    "family": "qwen3",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": True,
    "vocab_size": 387,
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "sliding_window": 24,
    "max_window_layers": 1,
    "max_position_embeddings": 4096,
}

# Of that model over two hosts of two devices, with a tokenizer, and with room for a request that
# outlasts the loss of a host.
OVER_HOSTS: dict[str, Any] = {
    name: value for name, value in SHARDED.items() if name != "skip_tokenizer_init"
} | {"max_model_len": 4096, "num_gpu_blocks_override": 512, "tensor_parallel_size": 4}


def as_flags(options: dict[str, Any]) -> list[str]:
    """The same, as they are written on the command line."""
    return [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in options.items()
    ]
