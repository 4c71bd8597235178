"""Which attention a plan takes on GPUs that the kernels are not for, and what it says."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest
from jaxllm_kernels.native.library import NoLibrary
from jaxllm_kernels.platform import CHIPS, chip_of
from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig, BatchLimits

from jaxllm.plan import choose_kernels

CONFIG = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, scale=0.1)
LIMITS = BatchLimits(num_tokens=2048, num_rows=64, max_blocks=128, block_size=64)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_size": 512}, "supports head sizes (64, 80, 96, 128, 256), not 512"),
        ({"chunk": 8192}, "does not cut contexts into chunks (of 8192 tokens)"),
        ({"v_head_size": 64}, "values have the size of keys, 128, not 64"),
    ],
)
def test_what_has_no_kernel_for_a_gpu_runs_on_xla(change, reason, caplog, monkeypatch):
    monkeypatch.setattr(choose_kernels.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(choose_kernels.logger, "propagate", False)
    monkeypatch.setattr("jaxllm_kernels.ragged_paged_attention.gpu.why_no_mosaic_gpu", str)
    configs = (CONFIG, dataclasses.replace(CONFIG, **change))
    chosen = choose_kernels.choose_attention(
        "auto", CHIPS["h200"], NoLibrary("this is a GPU"), configs, LIMITS, "bfloat16"
    )
    assert chosen.name == "xla"
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert "not 'mosaic_sm90'" in told and reason in told


@pytest.mark.parametrize(("chip", "name"), [("h200", "mosaic_sm90"), ("v6e", "tpu")])
def test_tokens_that_see_later_ones_have_the_kernels(chip, name, monkeypatch):
    monkeypatch.setattr("jaxllm_kernels.ragged_paged_attention.gpu.why_no_mosaic_gpu", str)
    chosen = choose_kernels.choose_attention(
        "auto", CHIPS[chip], NoLibrary("no CPU"), (CONFIG,), LIMITS, "bfloat16", sees_ahead=True
    )
    assert chosen.name == name


@pytest.mark.parametrize(
    ("kind", "capability"),
    [("NVIDIA A100-SXM4-80GB", "8.0"), ("NVIDIA L4", "8.9"), ("NVIDIA B200", "10.0")],
)
def test_other_gpus_run_on_xla_and_are_told_why(kind, capability, caplog, monkeypatch):
    monkeypatch.setattr(choose_kernels.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(choose_kernels.logger, "propagate", False)
    # What JAX tells of such a device.
    device = SimpleNamespace(
        platform="gpu", device_kind=kind, compute_capability=capability, core_count=100
    )
    chip = chip_of(device)
    chosen = choose_kernels.choose_attention(
        "auto", chip, NoLibrary("this is a GPU"), (CONFIG,), LIMITS, "bfloat16"
    )
    assert chosen.name == "xla"
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert "not 'mosaic_sm90'" in told.getMessage()
    assert f"runs on Hopper GPUs (compute capability 9.0), not on {kind}" in told.getMessage()
