"""Sources of experts: any box of them is what the same box of the whole array would be."""

import dataclasses

import numpy as np
import pytest

from jaxllm.models.checkpoint_map import CheckpointMap, Place, Tensor, Transposed
from jaxllm.models.expert_tensors import (
    GateAndUp,
    each_expert,
    router_with_bias_at,
    stacked_experts,
)

RANDOM = np.random.default_rng(0)
E, F, D = 3, 4, 5
GATE_UP, DOWN = RANDOM.standard_normal((E, 2, F, D)), RANDOM.standard_normal((E, D, F))
BIAS, DOWN_BIAS = RANDOM.standard_normal((E, 2, F)), RANDOM.standard_normal((E, D))
WANTED = {"w13_weight": GATE_UP, "w2_weight": DOWN, "w13_bias": BIAS, "w2_bias": DOWN_BIAS}


class Held(dict):
    """Tensors in memory; it notes how much is read of them at a time."""

    most = 0

    def copy(self, name, box, target, kind="float"):
        target[...] = self[name][box]
        self.most = max(self.most, target.size)


def per_expert():
    tensors = {}
    for e in range(E):
        for half, name in enumerate(("gate_proj", "up_proj")):
            tensors[f"mlp.experts.{e}.{name}.weight"] = GATE_UP[e, half]
            tensors[f"mlp.experts.{e}.{name}.bias"] = BIAS[e, half]
        tensors[f"mlp.experts.{e}.down_proj.weight"] = DOWN[e]
        tensors[f"mlp.experts.{e}.down_proj.bias"] = DOWN_BIAS[e]
    return tensors


def stacked():
    return {
        "mlp.all.gate_up": GATE_UP.reshape(E, 2 * F, D),
        "mlp.all.down": DOWN,
        "mlp.all.gate_up_bias": BIAS.reshape(E, 2 * F),
        "mlp.all.down_bias": DOWN_BIAS,
    }


def alternating():
    return {
        "mlp.all.gate_up": GATE_UP.transpose(0, 3, 2, 1).reshape(E, D, 2 * F),
        "mlp.all.down": DOWN.swapaxes(1, 2),
        "mlp.all.gate_up_bias": BIAS.swapaxes(1, 2).reshape(E, 2 * F),
        "mlp.all.down_bias": DOWN_BIAS,
    }


LAYOUTS = {
    "a tensor for each expert": (each_expert(), per_expert()),
    "stacked": (stacked_experts("all.gate_up", "all.down"), stacked()),
    "alternating": (
        stacked_experts("all.gate_up", "all.down", is_transposed=True, alternates=True),
        alternating(),
    ),
}


@pytest.mark.parametrize("leaf", WANTED)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_box_of_every_layout(name, leaf):
    rule, tensors = LAYOUTS[name]
    wanted = WANTED[leaf]
    source = rule(Place("mlp", "experts", leaf, (wanted.shape,)))
    assert source.shape == wanted.shape
    for rows in source.rows():
        assert tensors[rows.tensor.name].shape == rows.tensor.shape
    for seed in range(60):
        random = np.random.default_rng(seed)
        edges = [np.sort(random.choice(size + 1, 2, replace=False)) for size in wanted.shape]
        box = tuple(slice(int(first), int(end)) for first, end in edges)
        target = np.zeros_like(wanted[box])
        source.copy(Held(tensors), box, target)
        np.testing.assert_array_equal(target, wanted[box])


def test_each_tensor_is_used_once():
    for rule, tensors in LAYOUTS.values():
        used = [
            rows.tensor.name
            for leaf, wanted in WANTED.items()
            for rows in rule(Place("mlp", "experts", leaf, (wanted.shape,))).rows()
        ]
        assert sorted(used) == sorted(tensors)


def test_a_layout_that_stacks_experts_names_one_tensor_for_each():
    each, stacked = (
        CheckpointMap(rules={"experts": LAYOUTS[name][0]})
        for name in ("a tensor for each expert", "stacked")
    )
    names = [f"mlp.experts.{e}.{half}_proj" for e in range(E) for half in ("gate", "up")]
    for first, other, order in ((each, stacked, 1), (stacked, each, -1)):
        layouts = dataclasses.replace(first, others=(other,))
        found = layouts.modules("mlp.experts.w13_weight", (GATE_UP.shape,))
        assert found == [(name, "mlp.all.gate_up")[::order] for name in names]


def test_a_share_is_read_alone_and_an_expert_at_a_time():
    held = Held(alternating())
    source = GateAndUp(Transposed(Tensor("mlp.all.gate_up", (E, D, 2 * F))), alternates=True)
    target = np.zeros((2, 2, 1, D))
    source.copy(held, (slice(0, 2), slice(0, 2), slice(1, 2), slice(0, D)), target)
    np.testing.assert_array_equal(target, GATE_UP[:2, :, 1:2])
    assert held.most == 2 * D


def test_a_bias_of_the_router_elsewhere():
    rule = router_with_bias_at("statics.bias", is_row=True)
    source = rule(Place("mlp", "gate", "e_score_correction_bias", ((E,),)))
    target = np.zeros(2)
    source.copy(Held({"mlp.statics.bias": np.arange(3.0)[None]}), (slice(1, 3),), target)
    np.testing.assert_array_equal(target, [1, 2])
    assert rule(Place("mlp", "gate", "weight", ((E, D),))) == Tensor("mlp.gate.weight", (E, D))
