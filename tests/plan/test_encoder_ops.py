"""Which kernel the tokens of whole texts and the patches of images see each other by."""

import dataclasses

import pytest
from jaxllm_kernels.compat import why_no_mosaic_gpu
from jaxllm_kernels.native.library import NoLibrary
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_paged_attention.api import BatchLimits
from jaxllm_kernels.ragged_self_attention.gpu import MosaicSelfAttention
from jaxllm_kernels.ragged_self_attention.tpu import TpuSelfAttention

from jaxllm.files import read_json
from jaxllm.layers.self_attention import SelfAttentionSpec
from jaxllm.media.item import ImageSpec
from jaxllm.media.resizing import Area, Tiles
from jaxllm.models.architecture import read_architecture
from jaxllm.plan.choose_state_ops import encoder_ops
from jaxllm.plan.images import plan_images
from jaxllm.testing import make_tiny_checkpoint

LIBRARY = NoLibrary("an accelerator")
H200 = CHIPS["h200"]
needs_mosaic = pytest.mark.skipif(
    bool(why_no_mosaic_gpu()), reason=f"the GPU kernels: {why_no_mosaic_gpu()}"
)
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
def test_what_the_kernel_for_tpus_does_not_compute_is_said(changed, dtype, num_tokens, why, caplog):
    mixers = [SPEC, dataclasses.replace(SPEC, **changed)]
    ops = encoder_ops(CHIPS["v6e"], LIBRARY, dtype, 1, mixers, num_tokens)
    assert ops.self_attention.name == "xla"
    assert f"self-attention: XLA's loops, since {why}" in caplog.text


@needs_mosaic
@pytest.mark.parametrize("chip", ["h100", "h200"])
def test_hopper_has_a_kernel(chip, caplog):
    ops = encoder_ops(CHIPS[chip], LIBRARY, "bfloat16", 4, [SPEC], 1 << 18)
    assert ops.self_attention == MosaicSelfAttention()
    assert not caplog.records


@needs_mosaic
@pytest.mark.parametrize(
    ("changed", "dtype", "why"),
    [
        ({}, "float32", "it computes in 16 bits, not in float32"),
        ({"head_size": 192}, "bfloat16", "heads of 192 are neither of 256 nor up to 128"),
    ],
)
def test_what_the_kernel_for_hopper_does_not_compute_is_said(changed, dtype, why, caplog):
    mixers = [SPEC, dataclasses.replace(SPEC, **changed)]
    assert encoder_ops(H200, LIBRARY, dtype, 1, mixers, 64).self_attention.name == "xla"
    assert f"self-attention: XLA's loops, since {why}" in caplog.text


def test_other_gpus_take_the_loops(caplog):
    a100 = dataclasses.replace(H200, name="a100", compute_capability=(8, 0))
    assert encoder_ops(a100, LIBRARY, "bfloat16", 1, [SPEC], 64).self_attention.name == "xla"
    assert "since it runs on Hopper GPUs (compute capability 9.0), not on a100" in caplog.text


@pytest.mark.parametrize(("num_shards", "name"), [(1, "tpu"), (2, "xla")])
def test_a_tower_that_is_not_cut_has_no_kernel_on_several_devices(num_shards, name, caplog):
    is_cut = num_shards == 1
    ops = encoder_ops(CHIPS["v6e"], LIBRARY, "bfloat16", num_shards, [SPEC], 256, is_cut=is_cut)
    assert ops.self_attention.name == name
    assert ("XLA does not repeat the kernel on devices" in caplog.text) == (name == "xla")


def image_plan(family, folder, resizing, max_model_len, of_tower):
    """The plan of a tower with other images than those of its tiny checkpoint."""
    path = make_tiny_checkpoint(folder / "model", family, sees_images=True)
    architecture = read_architecture(read_json(path / "config.json"), sees_images=True)
    spec = ImageSpec(
        patch_size=14, merge=2, resizing=resizing, resample=3, scale=1 / 255, mean=(0.5,) * 3,
        std=(0.5,) * 3, image_token="[IMG]", image_token_id=3, max_images=1,
    )  # fmt: skip
    limits = BatchLimits(num_tokens=max_model_len, num_rows=1, max_blocks=1, block_size=16)
    images = plan_images(spec, architecture, of_tower, limits, max_model_len)
    assert images is not None
    return images


def test_a_tower_has_the_kernel_where_it_fits_and_xla_where_not(tmp_path, caplog):
    heads = dataclasses.replace(SPEC, num_heads=16, num_kv_heads=16, head_size=72)

    def of_tower(mixers, max_num_tokens):
        return encoder_ops(CHIPS["v7x"], LIBRARY, "bfloat16", 1, [heads], max_num_tokens)

    large = Area(min_pixels=1 << 10, max_pixels=1 << 26)
    images = image_plan("qwen3_5", tmp_path, large, 1 << 15, of_tower)
    names = {size: ops.self_attention.name for size, ops in images.ops.items()}
    assert names == {size: "tpu" if size <= 1 << 15 else "xla" for size in images.sizes}
    assert images.sizes[-1] == 1 << 17
    (record,) = caplog.records
    assert "keys and values of 65536 tokens do not fit into VMEM" in record.getMessage()


@pytest.mark.parametrize(
    ("family", "resizing", "of_unit"),
    [
        ("qwen3_5", Area(min_pixels=1 << 10, max_pixels=1 << 18), 0),
        ("internvl", Tiles(pixels=336, min_tiles=1, max_tiles=12), 1),
    ],
)
def test_tiles_alone_have_class_tokens(family, resizing, of_unit, tmp_path):
    asked = []

    def of_tower(mixers, max_num_tokens):
        asked.append(max_num_tokens)
        return encoder_ops(CHIPS["v6e"], LIBRARY, "bfloat16", 1, [SPEC], max_num_tokens)

    images = image_plan(family, tmp_path, resizing, 1 << 13, of_tower)
    assert asked == [size + of_unit * size // 24**2 for size in images.sizes]
