"""Plans of models with experts: how experts are computed, and what a step reads of them."""

import dataclasses

import pytest
from jaxllm_kernels.compat import why_no_mosaic_gpu
from jaxllm_kernels.experts.gpu import MosaicExperts
from jaxllm_kernels.experts.xla import XLA_EXPERTS
from jaxllm_kernels.native.library import NoLibrary
from jaxllm_kernels.platform import CHIPS

from jaxllm.config import EngineArgs
from jaxllm.models.whole_experts import with_whole_experts
from jaxllm.plan.choose_kernels import choose_experts, choose_products
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.report import roofline
from jaxllm.programs.roofline import ExpertLayers
from jaxllm.programs.summary import summary
from jaxllm.testing import make_tiny_checkpoint

needs_mosaic = pytest.mark.skipif(
    bool(why_no_mosaic_gpu()), reason=f"the GPU kernels: {why_no_mosaic_gpu()}"
)

OPTIONS = {"max_model_len": 64, "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("moe"), "qwen3_moe"))


@pytest.mark.parametrize(("options", "name"), [({}, "native"), ({"native_kernels": False}, "xla")])
def test_the_plan_says_how_experts_are_computed(model, options, name):
    plan = make_plan(EngineArgs(model, **OPTIONS, **options))
    assert plan.experts.name == name and f"experts {name!r}" in summary(plan)


def test_sizes_without_a_native_kernel_are_said(model, caplog):
    overrides = {"moe_intermediate_size": 24}
    plan = make_plan(EngineArgs(model, **OPTIONS, load_format="dummy", hf_overrides=overrides))
    assert plan.experts.name == "xla"
    assert "the size of an expert on a device, 24, is not a multiple of 32" in caplog.text


def test_a_bound_counts_the_experts_that_tokens_choose(model):
    plan = make_plan(EngineArgs(model, **OPTIONS))
    chip = dataclasses.replace(plan.chip, hbm_bytes_per_second=1e6, bf16_flops_per_second=1e18)
    line = roofline(dataclasses.replace(plan, chip=chip), *plan.stages)
    # One of two layers has 8 experts of 32, of which a token chooses 3.
    weights = 8 * 3 * 32 * 64
    itemsize = plan.dtype.itemsize
    assert line.experts == (ExpertLayers(weights * itemsize, 3 / 8),)
    embedding = plan.num_logits * 64 * itemsize
    dense = plan.weights_bytes - embedding - weights * itemsize
    assert line.bytes_per_step == dense
    head = embedding / itemsize
    assert line.flops_per_token == 2 * (dense / itemsize - head + weights * 3 / 8)
    nothing = (0.0, 0.0)
    assert line.bound(1, 1, nothing).seconds == (dense + weights * itemsize * 3 / 8) / 1e6
    of_all = line.bound(1000, 1, nothing).seconds
    assert of_all == pytest.approx((dense + weights * itemsize) / 1e6)


def test_a_bound_counts_codes_by_their_bytes_and_weights_by_their_number(model):
    lines, plans = [], []
    for quantization in (None, "int8"):
        plan = make_plan(EngineArgs(model, **OPTIONS, quantization=quantization))
        chip = dataclasses.replace(plan.chip, hbm_bytes_per_second=1e6, bf16_flops_per_second=1e18)
        lines.append(roofline(dataclasses.replace(plan, chip=chip), *plan.stages))
        plans.append(plan)
    floats, codes = lines
    (experts,) = codes.experts
    # Each output of 8 experts has a scale: 2 * 32 of gate and up, 64 of down.
    assert experts == ExpertLayers(8 * (3 * 32 * 64 + 4 * (2 * 32 + 64)), 3 / 8)
    embedding = plan.num_logits * 64 * plan.dtype.itemsize
    assert codes.bytes_per_step == plan.weights_bytes - embedding - experts.num_bytes
    assert codes.bytes_per_step < floats.bytes_per_step
    assert codes.flops_per_token == floats.flops_per_token
    # Experts with codes are computed by what is told of codes.
    assert plan.experts is None and plans[0].experts is not None
    assert "experts '" not in summary(plan) and "of experts: 'native'" in summary(plan)


@pytest.mark.parametrize(("chip", "names"), [("v7x", ["tpu", "xla"]), ("h200", ["xla"])])
def test_tpus_have_kernels_for_experts_with_codes(model, chip, names):
    architecture = make_plan(EngineArgs(model, **OPTIONS)).architecture
    none = NoLibrary("this is no CPU")
    products = choose_products(
        CHIPS[chip], none, architecture, 1, 64, "bfloat16", keeps_groups=False
    )
    assert [op.name for op in products.experts] == names
    assert [op.name for op in products.linear] == names


def test_expected_distinct_experts():
    experts = ExpertLayers(128.0, 8 / 128)
    assert experts.bytes_read(1) == 8
    assert experts.bytes_read(2) == 16 - 8 * 8 / 128
    assert experts.bytes_read(64) == pytest.approx(125.9, abs=0.1)


H200 = CHIPS["h200"]
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128}


def planned_for(chip, model, **options):
    """The experts of a plan for a chip, by the function that plans ask."""
    plan = make_plan(EngineArgs(model, **OPTIONS, load_format="dummy", hf_overrides=SIZES))
    architecture = plan.architecture
    if options.pop("are_whole", False):
        architecture = with_whole_experts(architecture)
    no_library = NoLibrary("this is a GPU")
    return choose_experts(chip, no_library, architecture, options["num_shards"], 64, "bfloat16")


@needs_mosaic
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_shards": 1}, MosaicExperts()),
        ({"num_shards": 2}, MosaicExperts()),
        ({"num_shards": 8, "are_whole": True}, MosaicExperts(num_devices=8)),
    ],
)
def test_hopper_has_kernels(model, options, expected):
    assert planned_for(H200, model, **options) == expected


@needs_mosaic
def test_sizes_without_a_gpu_kernel_are_said(model, caplog):
    assert planned_for(H200, model, num_shards=4) is XLA_EXPERTS
    assert "the size of an expert on a device, 32, is not a multiple of 64" in caplog.text


def test_other_gpus_take_the_loop(model, caplog):
    chip = dataclasses.replace(H200, name="a100", compute_capability=(8, 0))
    assert planned_for(chip, model, num_shards=1) is XLA_EXPERTS
    assert "it runs on Hopper GPUs (compute capability 9.0), not on a100" in caplog.text


def test_experts_without_gates_have_kernels(tmp_path):
    path = make_tiny_checkpoint(tmp_path, "nemotron_h")
    sizes = {"moe_latent_size": 64, "hidden_size": 80, "moe_intermediate_size": 64}
    args = EngineArgs(str(path), **OPTIONS, load_format="dummy", hf_overrides=sizes)
    plan = make_plan(args)
    # The vectors that experts compute with are others than hidden states.
    assert plan.experts.name == "native"
    chosen = [
        choose_experts(chip, NoLibrary("no CPU"), plan.architecture, 1, 64, "bfloat16").name
        for chip in (CHIPS["v6e"], H200)
    ]
    assert chosen == ["tpu", "xla" if why_no_mosaic_gpu() else "mosaic_sm90"]
