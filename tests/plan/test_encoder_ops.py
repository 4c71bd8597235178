"""Which kernel the tokens of whole texts and the patches of images see each other by."""

import dataclasses

import pytest
from jaxllm_kernels.native.library import NoLibrary
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_self_attention.tpu import TpuSelfAttention

from jaxllm.layers.self_attention import SelfAttentionSpec
from jaxllm.plan.choose_state_ops import encoder_ops

LIBRARY = NoLibrary("an accelerator")
SPEC = SelfAttentionSpec(num_heads=12, num_kv_heads=12, head_size=32, scale=1.0)


def test_tpus_have_a_kernel(caplog):
    ops = encoder_ops(CHIPS["v6e"], LIBRARY, "bfloat16", 4, [SPEC], 8192)
    assert ops.self_attention == TpuSelfAttention(chip="v6e")
    assert not caplog.records


@pytest.mark.parametrize(
    ("changed", "dtype", "num_tokens", "why"),
    [
        ({}, "float16", 8192, "dtype='float16' is not bfloat16 or float32"),
        ({"head_size": 512}, "bfloat16", 64, "heads of 512 are no multiple of 8 up to 256"),
        ({}, "bfloat16", 1 << 18, "keys and values of 262144 tokens do not fit into VMEM"),
    ],
)
def test_what_the_kernel_does_not_compute_is_said(changed, dtype, num_tokens, why, caplog):
    mixers = [SPEC, dataclasses.replace(SPEC, **changed)]
    ops = encoder_ops(CHIPS["v6e"], LIBRARY, dtype, 1, mixers, num_tokens)
    assert ops.self_attention.name == "xla"
    assert f"self-attention: XLA's loops, since {why}" in caplog.text


@pytest.mark.parametrize(("num_shards", "name"), [(1, "tpu"), (2, "xla")])
def test_a_tower_that_is_not_cut_has_no_kernel_on_several_devices(num_shards, name, caplog):
    ops = encoder_ops(
        CHIPS["v6e"], LIBRARY, "bfloat16", num_shards, [SPEC], 256, lambda shards: shards == 1
    )
    assert ops.self_attention.name == name
    assert ("XLA does not repeat the kernel on devices" in caplog.text) == (name == "xla")
