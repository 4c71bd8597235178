"""Which kernels recurrent layers have on GPUs and TPUs, and what is said where they have none."""

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from jaxllm_kernels.compat import why_no_mosaic_gpu
from jaxllm_kernels.gated_delta.gpu import MosaicDelta
from jaxllm_kernels.gated_delta.tpu import TpuDelta
from jaxllm_kernels.native.library import NoLibrary
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ssd.gpu import MosaicSsd
from jaxllm_kernels.ssd.tpu import TpuSsd

from jaxllm.config import EngineArgs
from jaxllm.plan.choose_state_ops import choose_state_ops
from jaxllm.plan.make_plan import make_plan
from jaxllm.testing import make_tiny_checkpoint

needs_mosaic = pytest.mark.skipif(
    bool(why_no_mosaic_gpu()), reason=f"the GPU kernels: {why_no_mosaic_gpu()}"
)
H200 = CHIPS["h200"]
# Sizes that the kernels compute.
DELTA_SIZES = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
MAMBA2_SIZES = {"head_dim": 64, "num_heads": 2, "hidden_size": 64, "state_size": 128}


class Part(NamedTuple):
    """What is asked of a part of a model."""

    state_configs: tuple[Any, ...] = (SimpleNamespace(arrays=()),)


def ops_for(chip, folder, family, num_shards=1, **sizes):
    """The ops of a plan for a chip, by the function that plans ask."""
    path = str(make_tiny_checkpoint(folder, family, dtype="bfloat16"))
    options = {"max_model_len": 64, "num_gpu_blocks_override": 64}
    plan = make_plan(EngineArgs(path, **options, load_format="dummy", hf_overrides=sizes))
    ops = choose_state_ops(
        chip,
        NoLibrary(f"a {chip.platform}"),
        plan.architecture,
        [Part()],
        "bfloat16",
        None,
        num_shards,
        None,
    )
    assert ops is not None
    return ops


@needs_mosaic
def test_hopper_has_a_kernel_for_the_delta_rule(tmp_path, caplog):
    ops = ops_for(H200, tmp_path, "qwen3_5", **DELTA_SIZES)
    assert ops.conv.name == "xla"
    assert ops.delta == MosaicDelta(num_workers=528)
    assert str(ops) == "'xla' and 'mosaic_sm90'"
    assert "of recurrent layers" not in caplog.text


@needs_mosaic
def test_hopper_has_a_kernel_for_mamba2(tmp_path, caplog):
    ops = ops_for(H200, tmp_path, "mamba2", **MAMBA2_SIZES)
    assert ops.ssd == MosaicSsd(num_workers=528)
    assert "of recurrent layers" not in caplog.text


@needs_mosaic
@pytest.mark.parametrize(
    ("family", "op", "size"), [("qwen3_5", "delta", "16 x 24"), ("mamba2", "ssd", "16 x 24")]
)
def test_sizes_without_a_gpu_kernel_are_said(family, op, size, tmp_path, caplog):
    assert getattr(ops_for(H200, tmp_path, family), op).name == "xla"
    expected = f"{op} of recurrent layers: XLA's loops, since a warpgroup holds no part of a state"
    assert f"{expected} of {size}" in caplog.text


@needs_mosaic
@pytest.mark.parametrize(
    ("family", "op", "sizes"), [("qwen3_5", "delta", DELTA_SIZES), ("mamba2", "ssd", MAMBA2_SIZES)]
)
def test_several_gpus_have_the_kernels_of_one(family, op, sizes, tmp_path, caplog):
    one, two = (
        getattr(ops_for(H200, tmp_path / str(num_shards), family, num_shards, **sizes), op)
        for num_shards in (1, 2)
    )
    assert two.name == "mosaic_sm90"
    assert two == one
    assert "of recurrent layers" not in caplog.text


def test_other_gpus_take_the_loops(tmp_path, caplog):
    a100 = dataclasses.replace(H200, name="a100", compute_capability=(8, 0))
    assert ops_for(a100, tmp_path, "qwen3_5").delta.name == "xla"
    assert "it runs on Hopper GPUs (compute capability 9.0), not on a100" in caplog.text


WIDE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
ONE_KEY = {"linear_num_key_heads": 1, "linear_num_value_heads": 8}


@pytest.mark.parametrize(
    ("chip", "sizes", "reason"),
    [
        ("v6e", WIDE, None),
        ("v4", WIDE, "the kernel takes one core, and v4 has 2"),
        ("v6e", WIDE | {"linear_value_head_dim": 256}, "states of 128 x 256 are not 128 x 128"),
        ("v6e", WIDE | ONE_KEY, "8 heads, 8 of a key, are more than 128 and 5"),
        (
            "v6e",
            WIDE | {"linear_num_key_heads": 32, "linear_num_value_heads": 160},
            "160 heads, 5 of a key, are more than 128 and 5",
        ),
    ],
    ids=str,
)
def test_tiles_that_the_tpu_kernel_does_not_compute_are_left_to_xla(
    tmp_path, caplog, chip, sizes, reason
):
    ops = ops_for(CHIPS[chip], tmp_path, "qwen3_5", **sizes)
    assert ops.delta == TpuDelta(chip=chip, with_tiles=reason is None)
    if reason is None:
        assert "of recurrent layers" not in caplog.text
    else:
        assert f"prompts of recurrent layers: XLA's loops, since {reason}" in caplog.text


def test_tiles_that_do_not_fit_into_the_memory_of_a_core_are_refused():
    delta = TpuDelta(chip="v7x")
    delta.check_tiles(64, 64, 128, 128, by_channel=True)
    with pytest.raises(ValueError, match="128 heads take .* bytes of VMEM, and there are"):
        delta.check_tiles(128, 128, 128, 128, by_channel=True)


@pytest.mark.parametrize(
    ("chip", "sizes", "reason"),
    [
        ("v6e", {}, None),
        ("v4", {}, "the kernel takes one core, and v4 has 2"),
        (
            "v6e",
            {"head_dim": 32, "num_heads": 4},
            "states of 32 x 128 are not 64 or 128 x 128 or 256",
        ),
        ("v6e", {"state_size": 384}, "states of 64 x 384 are not 64 or 128 x 128 or 256"),
        ("v6e", {"num_heads": 3}, "heads of a group: 3, which is odd"),
        ("v6e", {"num_heads": 130}, "130 heads are more than 128"),
    ],
    ids=str,
)
def test_tiles_of_mamba2_that_the_tpu_kernel_does_not_compute_are_left_to_xla(
    tmp_path, caplog, chip, sizes, reason
):
    sizes = MAMBA2_SIZES | {"n_groups": 1} | sizes
    sizes["hidden_size"] = sizes["num_heads"] * sizes["head_dim"] // 2
    ops = ops_for(CHIPS[chip], tmp_path, "mamba2", **sizes)
    assert ops.ssd == TpuSsd(chip=chip, with_tiles=reason is None)
    if reason is None:
        assert "of recurrent layers" not in caplog.text
    else:
        assert f"prompts of recurrent layers: XLA's loops, since {reason}" in caplog.text


def test_devices_check_tiles_of_their_own_heads_of_mamba2(tmp_path, caplog):
    ops = ops_for(CHIPS["v6e"], tmp_path, "mamba2", num_shards=2, n_groups=1, **MAMBA2_SIZES)
    assert ops.ssd == TpuSsd(chip="v6e", with_tiles=False)
    assert "since heads of a group: 1, which is odd" in caplog.text


def test_tiles_of_mamba2_that_do_not_fit_into_the_memory_of_a_core_are_refused():
    ssd = TpuSsd(chip="v7x")
    ssd.check_tiles(4, 128, 128, 256)
    with pytest.raises(ValueError, match="128 heads take .* bytes of VMEM, and there are"):
        ssd.check_tiles(16, 128, 128, 256)
