from jaxllm.models.architecture import read_architecture
from jaxllm.models.describe import describe_layers
from jaxllm.testing import tiny_config


def described(family, **fields):
    return describe_layers(read_architecture(tiny_config(family) | fields))


def test_equal_layers_are_one_line():
    (line,) = described("qwen3", num_hidden_layers=5, dtype="float32")
    assert line == (
        "0-4: PreNormBlock, RMSNorm(eps 1e-06), self_attn (num_heads 4, num_kv_heads 2, "
        "head_size 32, scale 0.176777, rope Rope(size 32, theta 10000), "
        "qk_norm QKNorm(norm RMSNorm(eps 1e-06))), mlp (intermediate_size 128)"
    )


def test_layers_that_differ_have_lines_of_their_own():
    windowed, full = described("gemma3", num_hidden_layers=7, dtype="float32")
    assert windowed.startswith("0-1, 3-4, 6: SandwichBlock")
    assert full.startswith("2, 5: SandwichBlock")
    assert "window 8" in windowed and "window" not in full
