import json

import pytest

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128001,
}

LLAMA_3_70B = LLAMA_3_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


@pytest.fixture(scope="session")
def llama_3_8b(tmp_path_factory):
    """A model directory without weights."""
    return _model_dir(tmp_path_factory.mktemp("llama_3_8b"), LLAMA_3_8B)


@pytest.fixture(scope="session")
def llama_3_70b(tmp_path_factory):
    """A model directory of the larger model, without weights."""
    return _model_dir(tmp_path_factory.mktemp("llama_3_70b"), LLAMA_3_70B)


def _model_dir(path, config):
    (path / "config.json").write_text(json.dumps(config))
    return str(path)
