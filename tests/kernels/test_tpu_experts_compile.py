"""The experts' kernels pass the TPU compilers, and no weights are copied for them."""

import functools
import importlib.util
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxllm_kernels.coded import CodedWeight, CodeForm
from jaxllm_kernels.experts.api import ExpertsConfig, ExpertWeights
from jaxllm_kernels.experts.cases import CLAMPED
from jaxllm_kernels.experts.tpu import TpuExperts
from jaxllm_kernels.platform import chip_of
from jaxllm_kernels.topology import topology_devices

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="NOTHING IS COMPILED FOR TPUS: libtpu is not installed (pip install 'jax[tpu]')",
    ),
]

SLICES = {"v5e": "v5e-8", "v6e": "v6e-8", "v7x": "v7x-8"}


class Model(NamedTuple):
    """The experts of a layer on one device."""

    num_experts: int
    size: int
    hidden_size: int
    num_choices: int
    config: ExpertsConfig = ExpertsConfig()
    has_bias: bool = False
    form: CodeForm | None = None


MODELS = {
    "Qwen3-30B-A3B, whole experts on 8 devices": Model(16, 768, 2048, 8),
    # Fewer intermediate values than lanes.
    "Qwen3-30B-A3B, cut in 8": Model(128, 96, 2048, 8),
    "Mixtral-8x7B, cut in 8": Model(8, 1792, 4096, 2),
    # No multiple of the lanes, and cut in 2 XLA turns its down projections.
    "gpt-oss-20b, whole experts on 8 devices": Model(4, 2880, 2880, 4, CLAMPED, True),
    "Nemotron 3 Nano, whole experts on 8 devices": Model(
        16, 1856, 2688, 6, ExpertsConfig(is_gated=False)
    ),
    "gpt-oss-20b, cut in 2": Model(32, 1440, 2880, 4, CLAMPED, True),
    "gpt-oss-120b in codes, whole experts on 8 devices": Model(
        16, 2880, 2880, 4, CLAMPED, True, CodeForm(codes="float8_e4m3fn")
    ),
    "DeepSeek-V3 in codes, whole experts on 8 devices": Model(
        32, 2048, 7168, 8, form=CodeForm(codes="float8_e4m3fn", group=128)
    ),
    "Qwen3-30B-A3B in codes, whole experts on 8 devices": Model(
        16, 768, 2048, 8, form=CodeForm(codes="int8")
    ),
}
# Groups of codes take the same code, and more of it.
SPARED = {"gpt-oss-120b in codes, whole experts on 8 devices"}


@pytest.fixture(scope="module")
def devices():
    """Devices of a chip's topology, by its name."""
    return functools.cache(lambda chip: topology_devices(SLICES[chip]))


def compile_experts(model: Model, num_tokens: int, device) -> jax.stages.Compiled:
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    experts, size, hidden = model.num_experts, model.size, model.hidden_size
    halves, form = model.config.num_halves, model.form

    def matrix(*shape):
        if form is None:
            return array(*shape)
        scales = array(*shape[:-1], form.num_groups(shape[-1]), dtype=form.scale_dtype)
        return CodedWeight(codes=array(*shape, dtype=form.codes), scales=scales, form=form)

    weights = ExpertWeights(
        gate_up=matrix(experts, halves, size, hidden),
        down=matrix(experts, hidden, size),
        gate_up_bias=array(experts, halves, size) if model.has_bias else None,
        down_bias=array(experts, hidden) if model.has_bias else None,
    )
    op = TpuExperts(chip=chip_of(device).name)
    choices = (num_tokens, model.num_choices)
    run = jax.jit(lambda *operands: op(*operands, config=model.config))
    lowered = run.lower(
        array(num_tokens, hidden),
        array(*choices, dtype=jnp.int32),
        array(*choices, dtype=jnp.float32),
        weights,
    )
    return lowered.compile()


# Any instruction that only moves an array, also to other memory.
MOVES = re.compile(r"= \(?\w+\[([\d,]+)\][^=\n]*? (?:copy|copy-start|slice-start|transpose)\(")


def assert_compiles(model: Model, num_tokens: int, device) -> None:
    compiled = compile_experts(model, num_tokens, device)
    of_expert = model.size * model.hidden_size
    moved = [math.prod(map(int, dims.split(","))) for dims in MOVES.findall(compiled.as_text())]
    rows = num_tokens * model.hidden_size
    # The smallest array of weights is larger than activations here, or both are small.
    assert all(size < model.num_experts * of_expert or size <= 2 * rows for size in moved)
    # Tokens and sums that are padded, and the list of choices.
    assert compiled.memory_analysis().temp_size_in_bytes <= 8 * rows + (4 << 20)


@pytest.mark.parametrize(
    ("chip", "name", "num_tokens"),
    [
        pytest.param(
            chip,
            name,
            num_tokens,
            # The chips go round, so that each meets both kernels.
            marks=[] if (row + column) % 3 == index and name not in SPARED else pytest.mark.sweep,
        )
        for index, chip in enumerate(SLICES)
        for row, name in enumerate(MODELS)
        for column, num_tokens in enumerate((8, 1024))
    ],
)
def test_experts_compile_without_copies_of_weights(chip, name, num_tokens, devices):
    assert_compiles(MODELS[name], num_tokens, devices(chip)[0])


@pytest.mark.sweep
@pytest.mark.parametrize("num_tokens", [1, 128, 2048])
@pytest.mark.parametrize("chip", SLICES)
def test_experts_of_mixtral_compile_whole(chip, num_tokens, devices):
    assert_compiles(Model(8, 14336, 4096, 2), num_tokens, devices(chip)[0])
