"""When a plan takes the native kernels for CPUs, and when it does not."""

import logging
import shutil
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from jaxllm_kernels.dense.api import XLA
from jaxllm_kernels.dense.native import NativeMatmul
from jaxllm_kernels.native.library import Library
from jaxllm_kernels.sampler.native import NativeSampler

from jaxllm import LLM, LogitsProcessor, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError
from jaxllm.plan.int4 import bytes_as_int4
from jaxllm.plan.make_plan import make_plan
from jaxllm.plan.memory import format_bytes
from jaxllm.programs.summary import summary
from jaxllm.testing import make_tiny_checkpoint

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler is here"
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")
    options: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 22}
    return lambda **changes: make_plan(EngineConfig.create(str(model), **{**options, **changes}))


@needs_compiler
def test_they_run_where_nobody_asks_for_others(plan):
    made = plan()
    assert made.attention.name == "native" and isinstance(made.matmul, NativeMatmul)
    assert plan(attention_backend="native").attention == made.attention
    asked_for_xla = plan(attention_backend="xla")
    assert asked_for_xla.attention.name == "xla" and asked_for_xla.matmul == made.matmul


@needs_compiler
@pytest.mark.parametrize(
    ("family", "options", "parts"),
    [
        ("qwen3", {}, {"sampler-float32"}),
        # Its routers multiply in float32.
        ("ernie4_5_moe", {}, {"sampler-float32", "experts-bfloat16", "dense-float32"}),
        ("qwen3", {"runner": "pooling"}, set()),
        # The layers behind the pooling multiply in float32.
        ("qwen3", {"runner": "pooling", "convert": "classify"}, {"dense-float32"}),
    ],
)
def test_with_fixed_orders_no_more_is_built_than_runs(
    tmp_path, monkeypatch, family, options, parts
):
    asked = set()

    def load(library, part):
        asked.update(f"{part.name}-{dtype}" for dtype in library._dtypes_of(part))

    monkeypatch.setattr(Library, "_load", load)
    monkeypatch.setattr(Library, "_build", lambda library, parts: None)
    model = str(make_tiny_checkpoint(tmp_path, family, head_dim=32))
    fixed = {"dtype": "bfloat16", "batch_invariant": True, "kv_cache_memory_bytes": 1 << 22}
    make_plan(EngineConfig.create(model, **fixed, **options))
    base = {f"{part}-bfloat16" for part in ("dense", "attention", "row-sums")}
    assert asked == base | {"row-sums-float32"} | parts


class Halves(LogitsProcessor):
    def encode(self, params):
        return None

    def apply(self, logits, params, output_index):
        return logits / 2


@needs_compiler
def test_tokens_are_chosen_by_our_own_code_but_for_users_processors(plan):
    made = plan()
    assert isinstance(made.sampling.op, NativeSampler) and "native sampler" in summary(made)
    assert plan(logits_processors=[Halves]).sampling.op is None
    assert plan(native_kernels=False).sampling.op is None


@needs_compiler
def test_the_patches_of_images_see_each_other_by_our_own_code(tmp_path):
    model = make_tiny_checkpoint(tmp_path / "model", "qwen3_5", sees_images=True)
    options: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 22}
    for native_kernels, name in ((True, "native"), (False, "xla")):
        config = EngineConfig.create(str(model), native_kernels=native_kernels, **options)
        made = make_plan(config)
        assert made.images is not None
        assert {ops.self_attention.name for ops in made.images.ops.values()} == {name}
        assert f", attention between patches {name!r}" in summary(made)


@needs_compiler
def test_the_summary_says_what_codes_of_4_bits_would_bring(plan):
    made, coded = plan(), plan(quantization="int4")
    told = bytes_as_int4(made)
    assert told is not None
    assert told == pytest.approx(coded.weights_bytes, rel=0.03) and told < made.weights_bytes
    assert f"int4 would make the weights about {format_bytes(told)}" in summary(made)
    for other in (coded, plan(native_kernels=False)):
        assert "int4 would" not in summary(other)


@needs_compiler
@pytest.mark.parametrize(
    ("family", "has_zeros"),
    [
        pytest.param("llama", True, marks=pytest.mark.sweep),
        ("qwen2", True),  # with biases besides, whose sums are not multiplied any more
        ("gpt2", False),  # layer norms with biases
    ],
)
def test_rows_of_padding_are_alike_wherever_they_are_multiplied(
    family, has_zeros, tmp_path, new_cache, monkeypatch
):
    """Zeros, or where biases make something of zeros, rows that repeat one another."""
    shapes, are_zeros = [], []
    multiply = NativeMatmul.__call__

    def look(x):
        differs = np.any(x != x[-1], axis=1).nonzero()[0].max(initial=-1) + 1
        shapes.append((len(x), int(differs)))
        are_zeros.append(not x[-1].any())

    def multiply_and_look(self, x, weight):
        jax.debug.callback(look, x)
        return multiply(self, x, weight)

    monkeypatch.setattr(NativeMatmul, "__call__", multiply_and_look)
    model = make_tiny_checkpoint(tmp_path / "model", family)
    options: dict[str, Any] = {
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 22,
        "enforce_eager": True,
    }
    llm = LLM(str(model), compilation_cache_dir=str(new_cache()), **options)
    prompts: list[Any] = [{"prompt_token_ids": [5 + i, 6, 7, 8]} for i in range(5)]
    llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    jax.effects_barrier()
    # Prompts of 20 tokens in a step of 128; three steps of five decodes in eight rows.
    products = 4 * 2  # four in each layer
    assert Counter(shapes) == {
        (128, 20): products, (8, 5): 1 + 3 * (products + 1)
    }  # fmt: skip
    assert all(are_zeros) == has_zeros


def test_they_can_be_turned_off(plan):
    made = plan(native_kernels=False)
    assert made.attention.name == "xla" and made.matmul is XLA
    with pytest.raises(ValidationError, match="attention_backend='native'.*native_kernels is off"):
        plan(native_kernels=False, attention_backend="native")


def test_without_a_compiler_xla_runs_and_nobody_is_warned(plan, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO):
        made = plan()
    assert made.attention.name == "xla" and made.matmul is XLA
    told = [record for record in caplog.records if "no C++ compiler" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.INFO]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    with pytest.raises(ValidationError, match="attention_backend='native'.*no C\\+\\+ compiler"):
        plan(attention_backend="native")
