"""Which attention a plan takes on GPUs that the kernels are not for, and what it says."""

import logging
from types import SimpleNamespace

import pytest
from jaxllm_kernels.native.library import NoLibrary
from jaxllm_kernels.platform import chip_of
from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig, BatchLimits

from jaxllm.plan import choose_kernels

CONFIG = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, scale=0.1)
LIMITS = BatchLimits(num_tokens=2048, num_rows=64, max_blocks=128, block_size=64)


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
