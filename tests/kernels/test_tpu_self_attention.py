"""Self-attention on TPUs, emulated on a CPU: results, races, padding, and sizes that fit."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig
from jaxllm_kernels.ragged_self_attention.cases import CASES, TOLERANCES, Case, error
from jaxllm_kernels.ragged_self_attention.tpu import TpuSelfAttention
from jaxllm_kernels.ragged_self_attention.tpu_sizes import Heads, KernelSizes, choose_sizes

emulated = pytest.mark.usefixtures("no_races")

OP = TpuSelfAttention(chip="v6e", interpret=True)
TWO_CORES = dataclasses.replace(OP, chip="v4")
LENGTHS = (200, 1, 90, 130)
# Sizes that registers have whole or not, and how heads are divided among steps.
HEADS = {
    "all at once": {"num_heads": 4, "num_kv_heads": 4, "head_size": 32},
    "no whole registers": {"num_heads": 2, "num_kv_heads": 2, "head_size": 72},
    "several steps": {"num_heads": 16, "num_kv_heads": 16, "head_size": 64},
    "a key's queries in parts": {"num_heads": 16, "num_kv_heads": 1, "head_size": 128},
    "two keys' queries in parts": {"num_heads": 14, "num_kv_heads": 2, "head_size": 80},
    "large": {"num_heads": 3, "num_kv_heads": 1, "head_size": 256},
    "of latents": {"num_heads": 2, "num_kv_heads": 2, "head_size": 192, "value_size": 128}
    | {"causal": True, "left_out": (1, 2)},
}
# A score is a sum of as many products as a head has numbers, and its rounding error becomes a
# relative error of weights. So in float32 these have larger errors than the small heads of CASES:
# the reference, too, has up to 4.9e-6 here.
FLOAT32_TOLERANCES = {
    "all at once": TOLERANCES["float32"],
    "no whole registers": 2.5e-6,
    "several steps": 3e-6,
    "a key's queries in parts": 5e-6,
    "two keys' queries in parts": 3.5e-6,
    "large": 5e-6,
    "of latents": 5e-6,
}
ALWAYS = {"short rows", "grouped heads", "a long reach", "no even number of tokens"}
ALWAYS |= {"causal, grouped, and larger values", "rows left out"}


@emulated
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.sweep) for name in (*CASES,)],
)
def test_cases(name):
    assert error(OP, CASES[name]) < TOLERANCES["float32"]


@emulated
@pytest.mark.parametrize(
    ("name", "dtype", "op"),
    [
        ("two keys' queries in parts", "bfloat16", OP),
        ("of latents", "float32", OP),
        *(
            pytest.param(name, dtype, op, marks=pytest.mark.sweep)
            for name in HEADS
            for dtype in TOLERANCES
            for op in (OP, TWO_CORES)
            if (name, dtype, op)
            not in (("two keys' queries in parts", "bfloat16", OP), ("of latents", "float32", OP))
        ),
    ],
    ids=lambda value: value.chip if isinstance(value, TpuSelfAttention) else value,
)
def test_heads(name, dtype, op):
    case = Case(lengths=LENGTHS, num_tokens=512, **HEADS[name])
    most = FLOAT32_TOLERANCES[name] if dtype == "float32" else TOLERANCES[dtype]
    assert error(op, case, dtype) < most


@emulated
def test_a_block_that_only_some_queries_of_a_tile_see_has_masks():
    # The third tile has queries of both rows, and its second block is of the first row alone.
    case = Case(lengths=(700, 200), num_tokens=1024, num_heads=2, num_kv_heads=2, head_size=64)
    assert error(OP, case) < TOLERANCES["float32"]


@emulated
def test_what_is_no_number_in_padding_stays_there_and_outputs_of_padding_are_zeros():
    random = np.random.default_rng(4)
    q, k, v = (jnp.asarray(random.normal(size=(300, 2, 32)), jnp.bfloat16) for _ in range(3))
    starts = jnp.asarray([0, 40, 270, 270], jnp.int32)
    config = SelfAttentionConfig(scale=0.3)
    expected = np.asarray(OP(q, k, v, starts, config), np.float32)
    spoilt = (x.at[270:].set(jnp.nan) for x in (q, k, v))
    out = np.asarray(OP(*spoilt, starts, config), np.float32)
    assert not out[270:].any()
    np.testing.assert_array_equal(out, expected)


@emulated
def test_keys_that_no_tile_sees_are_not_computed():
    # Where the kernel read a block that no query of its tile sees, the number would spread.
    random = np.random.default_rng(4)
    q, k, v = (jnp.asarray(random.normal(size=(1024, 1, 128)), jnp.float32) for _ in range(3))
    starts = jnp.asarray([0, 256, 512, 768, 1024], jnp.int32)
    config = SelfAttentionConfig(scale=0.1)
    v = v.at[512:768].set(jnp.nan)
    out = np.asarray(OP(q, k, v, starts, config))
    assert np.isnan(out[512:768]).all()
    assert np.isfinite(out[:512]).all() and np.isfinite(out[768:]).all()


@pytest.mark.parametrize(
    ("heads", "num_tokens", "chip", "expected"),
    [
        ((12, 12, 32), 8192, "v5e", KernelSizes(256, 256, 12, 12, 2)),
        ((16, 16, 72), 4096, "v5e", KernelSizes(256, 256, 8, 8, 2)),
        # Fewer heads at a time, and then one buffer.
        ((12, 12, 64), 8192, "v7x", KernelSizes(256, 256, 3, 3, 2)),
        ((16, 16, 80), 1 << 15, "v7x", KernelSizes(256, 256, 1, 1, 1)),
        ((32, 8, 128), 2048, "v4", KernelSizes(256, 256, 1, 4, 2)),
        # Queries of a key in parts.
        ((64, 1, 128), 64, "v6e", KernelSizes(128, 128, 1, 8, 2)),
        # Of latents, whose values are smaller: DeepSeek V3 over eight chips.
        ((16, 16, 192, 128), 8192, "v6e", KernelSizes(256, 256, 2, 2, 2)),
        # A part of them, since all leave no room for keys.
        ((3, 1, 256), 2048, "v4", KernelSizes(256, 256, 1, 1, 1)),
    ],
)
def test_sizes(heads, num_tokens, chip, expected):
    assert choose_sizes(num_tokens, Heads(*heads), jnp.bfloat16, CHIPS[chip]) == expected


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dtype": "float16"}, "dtype='float16' is not bfloat16 or float32"),
        ({"head_size": 512}, "heads of 512 are no multiple of 8 up to 256"),
        ({"value_size": 68}, "heads of 68 are no multiple of 8 up to 256"),
        ({"num_tokens": 1 << 18}, "keys and values of 262144 tokens do not fit into VMEM"),
    ],
)
def test_what_it_does_not_compute_is_refused(changed, why):
    asked = {
        "num_tokens": 8192, "num_heads": 16, "num_kv_heads": 16, "head_size": 64,
        "dtype": "bfloat16",
    }  # fmt: skip
    OP.check(**asked)
    with pytest.raises(ValueError, match=why):
        OP.check(**asked | changed)


def test_a_chip_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="the chip 'v9' is not known"):
        TpuSelfAttention(chip="v9").check(
            num_tokens=64, num_heads=2, num_kv_heads=2, head_size=64, dtype="float32"
        )
