"""Plans of models whose layers keep latents: which op runs, and the bytes of its caches."""

import dataclasses

import jax
import numpy as np
import pytest
from jaxllm_kernels.mla.api import LatentConfig
from jaxllm_kernels.mla.tpu import TpuLatentBackend
from jaxllm_kernels.mla.xla import XlaLatentBackend
from jaxllm_kernels.native.library import NoLibrary
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig, BatchLimits

from jaxllm.config import EngineArgs
from jaxllm.errors import UnsupportedModelError
from jaxllm.plan.choose_kernels import choose_attention
from jaxllm.plan.expand_latents import fewest_tokens, with_expanded_latents
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.report import roofline
from jaxllm.programs.summary import summary
from jaxllm.testing import make_tiny_checkpoint

OPTIONS = {"max_model_len": 64, "num_gpu_blocks_override": 64, "block_size": 16}
LATENTS = LatentConfig(num_heads=4, latent_size=32, rope_size=8, scale=0.1)
HEADS = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=16, scale=0.1)
NONE = NoLibrary("it is not needed")
LIMITS = BatchLimits(num_tokens=64, num_rows=4, max_blocks=4, block_size=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return str(make_tiny_checkpoint(path, "deepseek_v3", dtype="bfloat16"))


@pytest.mark.parametrize(("name", "width"), [("native", 48), ("xla", 128)])
def test_layers_keep_a_padded_row_for_each_token(model, name, width):
    plan = make_plan(EngineArgs(model, attention_backend=name, **OPTIONS))
    (stage,) = plan.stages
    assert [shape.shape for shape in stage.cache_shapes] == [(64, 16, width)] * 2
    assert stage.block_bytes == (16 * width * 2,) * 2
    (group,) = plan.cache_groups
    assert (group.window, group.num_blocks) == (None, 64)
    assert f"latent attention '{name}'" in summary(plan)


def latent_specs(plan):
    return {mixer for layer in plan.architecture.layers for mixer in layer.mixers}


def test_prompts_of_many_tokens_have_keys_and_values(model):
    """Of 2 * 32 * 28 products for a token and 36 fewer for a pair, where it sees half of them."""
    plan = make_plan(EngineArgs(model, **OPTIONS, max_num_batched_tokens=64))
    (spec,) = latent_specs(plan)
    assert spec.expanded.fewest_tokens == 50
    assert f"keys and values by '{spec.expanded.op.name}' for prompts of 50 tokens" in summary(plan)
    assert {config.fewest_fresh for config in plan.attention_configs} == {50}


def test_programs_of_short_steps_and_of_decodes_have_no_second_form(model):
    options = OPTIONS | {"native_kernels": True}
    plan = make_plan(EngineArgs(model, **options, max_num_batched_tokens=64, max_num_seqs=8))
    (spec,) = latent_specs(plan)
    name = "jaxllm_self_attention" if spec.expanded.op.name == "native" else "latent_expanded"
    programs = declare_programs(plan, make_packer(plan).layouts)
    has = {bucket: name in programs[bucket].lower().as_text() for bucket in plan.buckets}
    assert has == {
        bucket: not bucket.decode_only and bucket.num_tokens >= 50 for bucket in plan.buckets
    }
    assert set(has.values()) == {True, False}


@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 49}, {"max_num_batched_tokens": 64, "batch_invariant": True}],
    ids=["no prompt has so many tokens in a step", "the same bits in every chunk"],
)
def test_all_rows_are_computed_alike(model, options):
    plan = make_plan(EngineArgs(model, max_num_seqs=8, **OPTIONS, **options))
    (spec,) = latent_specs(plan)
    assert spec.expanded is None
    assert "for prompts of" not in summary(plan)


def test_where_latents_are_no_larger_than_keys_and_values_none_are_made(model):
    (spec,) = latent_specs(make_plan(EngineArgs(model, **OPTIONS)))
    assert fewest_tokens(dataclasses.replace(spec, latent_size=14)) is None
    deepseek = dataclasses.replace(spec, latent_size=512, nope_size=128, v_head_size=128)
    assert fewest_tokens(deepseek) == 342


def test_a_chip_without_a_kernel_computes_all_rows_alike_and_says_why(model, caplog):
    plan = make_plan(EngineArgs(model, **OPTIONS))
    same = with_expanded_latents(plan.architecture, CHIPS["h200"], NONE, 1, 64, "bfloat16")
    assert same == plan.architecture
    assert "latent attention: whole prompts are computed like other rows, since" in caplog.text


def test_every_device_has_all_latents(model):
    devices = jax.devices()[:1] * 2
    plan = make_plan(EngineArgs(model, tensor_parallel_size=2, **OPTIONS), devices)
    (stage,) = plan.stages
    assert stage.block_bytes == (16 * 48 * 2,) * 2
    assert {config.num_heads for config in stage.attention_configs} == {2}


def test_a_bound_counts_rows_and_products_with_latents(model):
    plan = make_plan(EngineArgs(model, **OPTIONS))
    chip = dataclasses.replace(plan.chip, hbm_bytes_per_second=1e6, bf16_flops_per_second=1e18)
    line = roofline(dataclasses.replace(plan, chip=chip), *plan.stages)
    (window,) = line.windows
    assert window.bytes_per_token == 2 * 48 * 2
    assert window.flops_per_attended == 2 * 2 * 4 * (40 + 32)


def test_a_bound_counts_products_with_keys_of_whole_prompts(model):
    plan = make_plan(EngineArgs(model, **OPTIONS, max_num_batched_tokens=64))
    line = roofline(dataclasses.replace(plan, chip=CHIPS["v6e"]), *plan.stages)
    (window,) = line.windows
    assert (window.fewest_fresh, window.flops_per_fresh) == (50, 2 * 2 * 4 * (28 + 8))
    contexts = np.array([50, 51, 49])  # a whole prompt, the end of one, and one with few tokens
    _, num_flops = line.attention(np.array([50, 50, 49]), contexts)
    pairs = np.array([25.5 * 50, 26.5 * 50, 25 * 49])
    assert num_flops.tolist() == (pairs * 16 * np.array([36, 72, 72])).tolist()


def test_a_tpu_runs_its_kernels_or_says_why_not(caplog):
    chip = CHIPS["v6e"]
    backend = choose_attention("auto", chip, NONE, [LATENTS], LIMITS, "bfloat16")
    assert backend == TpuLatentBackend().tuned_for(chip)
    assert not caplog.text
    small = dataclasses.replace(LIMITS, block_size=8)
    backend = choose_attention("auto", chip, NONE, [LATENTS], small, "bfloat16")
    assert backend == XlaLatentBackend().tuned_for(chip)
    assert "not 'tpu', since block_size=8 is not a multiple" in caplog.text


def test_a_gpu_runs_loops_of_xla_where_its_kernels_refuse(caplog):
    chip = CHIPS["h200"]
    backend = choose_attention("auto", chip, NONE, [LATENTS], LIMITS, "bfloat16")
    assert backend == XlaLatentBackend().tuned_for(chip)
    # Sizes that no model has; or the version of JAX.
    assert "attention: not 'mosaic_sm90', since attention backend mosaic_sm90" in caplog.text


def test_a_model_of_both_kinds_is_refused():
    with pytest.raises(UnsupportedModelError, match="some layers keep latents, and others"):
        choose_attention("auto", CHIPS["cpu"], NONE, [LATENTS, HEADS], LIMITS, "bfloat16")
