"""How keys and values are cached: what is chosen, what it takes, and what is refused."""

import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.summary import summary
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    windows = {"sliding_window": 24}
    return {
        family: str(make_tiny_checkpoint(path / family, family, **its))
        for family, its in (("llama", {}), ("gemma3", windows), ("deepseek_v3", {}))
    }


def plan_of(model, **options):
    return make_plan(EngineConfig.create(model, **(TINY | {"native_kernels": False} | options)))


def test_codes_take_a_byte(models):
    plain, coded = (plan_of(models["llama"], kv_cache_dtype=its) for its in ("auto", "fp8"))
    assert coded.kv_cache_bytes * 4 == plain.kv_cache_bytes
    assert plain.kv_cache is None and coded.kv_cache.codes == "float8_e4m3fn"
    assert "of float8_e4m3fn with scales of 1.0: 64 blocks" in summary(coded)
    # As many bytes hold four times as many blocks.
    options = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 20}
    plain, coded = (
        plan_of(models["llama"], kv_cache_dtype=its, **options) for its in ("auto", "int8")
    )
    assert coded.num_blocks == 4 * plain.num_blocks
    assert coded.kv_cache.scales == "calculated at the start"


@pytest.mark.parametrize("named", [["sliding_window"], ["0", "1"]])
def test_layers_that_are_skipped_keep_the_models_type(models, named):
    plan = plan_of(models["gemma3"], kv_cache_dtype="int8", kv_cache_dtype_skip_layers=named)
    windows = [config.sliding_window for config in plan.attention_configs]
    kept = [i for i, window in enumerate(windows) if window] if named[0] != "0" else [0, 1]
    assert 0 < len(kept) < len(windows)
    assert list(plan.kv_cache.skipped) == kept
    for index, (config, cache) in enumerate(
        zip(plan.attention_configs, plan.stages[0].cache_shapes, strict=True)
    ):
        assert config.kv_dtype == (None if index in kept else "int8")
        assert cache.dtype == (np.float32 if index in kept else np.int8)


@pytest.mark.parametrize(
    ("family", "options", "error"),
    [
        ("llama", {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2' is not one of"),
        ("llama", {"kv_cache_dtype": "bfloat16"}, "the model computes in float32"),
        ("llama", {"calculate_kv_scales": True}, "calculate_kv_scales=True: the cache has no"),
        ("llama", {"kv_cache_dtype_skip_layers": ["0"]}, "skip_layers=.*: the cache has no codes"),
        (
            "llama",
            {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["2"]},
            "skip_layers='2': no layer is meant; give numbers from 0 to 1",
        ),
        (
            "llama",
            {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["sliding_window"]},
            "skip_layers='sliding_window': no layer",
        ),
        ("deepseek_v3", {"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8': .* keeps latents"),
    ],
)
def test_what_cannot_be_is_refused_by_name(models, family, options, error):
    with pytest.raises(ValidationError, match=error):
        plan_of(models[family], **options)


def test_made_up_weights_have_scales_of_one(models):
    plan = plan_of(models["llama"], kv_cache_dtype="fp8", load_format="dummy")
    assert plan.kv_cache.scales == "of 1.0"
