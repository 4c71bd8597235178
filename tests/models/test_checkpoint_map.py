"""Sources: any box of them is what the same box of the whole array would be."""

import itertools

import numpy as np
import pytest

from jaxllm.models.checkpoint_map import (
    CheckpointMap,
    Concat,
    InHalves,
    Rows,
    Stack,
    Tensor,
    Transposed,
    ViewedAs,
    concatenated,
    rotated_in_pairs,
)


class Held(dict):
    """Tensors in memory; it notes what is read of them."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.boxes = []

    def copy(self, name, box, target, kind="float"):
        self.boxes.append((name, box))
        target[...] = self[name][box]


RANDOM = np.random.default_rng(0)
DATA = Held(
    {
        "a": RANDOM.standard_normal((6, 5)).astype(np.float32),
        "b": RANDOM.standard_normal((4, 5)).astype(np.float32),
        "c": RANDOM.standard_normal((6, 5)).astype(np.float32),
        "cube": RANDOM.standard_normal((2, 3, 4)).astype(np.float32),
        "line": RANDOM.standard_normal(6).astype(np.float32),
    }
)
A, B, C, CUBE, LINE = (Tensor(name, array.shape) for name, array in DATA.items())
a, b, c, cube, line = DATA.values()
# Two heads of six rows, of which four are pairs.
PAIRED = [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
CASES = {
    "tensor": (A, a),
    "a line": (LINE, line),
    "rows": (Rows(A, 2, 5), a[2:5]),
    "rows of a line": (Rows(LINE, 1, 4), line[1:4]),
    "concatenated": (Concat((A, B, Rows(C, 0, 2))), np.concatenate([a, b, c[:2]])),
    "stacked": (Stack((A, C)), np.stack([a, c])),
    "transposed": (Transposed(A), a.T),
    "transposed cube": (Transposed(CUBE), cube.swapaxes(1, 2)),
    "view of transposed": (ViewedAs(Transposed(A), (10, 3)), a.T.reshape(10, 3)),
    "stack of transposed": (Stack((Transposed(A), Transposed(C))), np.stack([a.T, c.T])),
    "pairs in halves": (InHalves(Concat((A, C)), 6, 4), np.concatenate([a, c])[PAIRED]),
    "pairs of a line in halves": (InHalves(LINE, 3, 2), line),
    "split rows": (ViewedAs(A, (3, 2, 5)), a.reshape(3, 2, 5)),
    "joined rows": (ViewedAs(CUBE, (6, 4)), cube.reshape(6, 4)),
    "rows that end in the middle of rows": (ViewedAs(A, (10, 3)), a.reshape(10, 3)),
    "experts": (
        Stack((Concat((A, B)), Concat((C, B)))),
        np.stack([np.concatenate([a, b]), np.concatenate([c, b])]),
    ),
}


def boxes(shape):
    """All boxes of an array but the empty ones."""
    edges = [itertools.combinations(range(size + 1), 2) for size in shape]
    return (tuple(itertools.starmap(slice, box)) for box in itertools.product(*edges))


@pytest.mark.parametrize("name", CASES)
def test_every_box_is_that_of_the_whole(name):
    source, whole = CASES[name]
    assert source.shape == whole.shape
    for box in boxes(whole.shape):
        target = np.full([cut.stop - cut.start for cut in box], np.nan, np.float32)
        source.copy(DATA, box, target)
        np.testing.assert_array_equal(target, whole[box])


def test_values_take_the_type_of_the_target():
    target = np.empty((6, 2), np.float16)
    ViewedAs(Transposed(Transposed(A)), (6, 5)).copy(DATA, (slice(0, 6), slice(1, 3)), target)
    np.testing.assert_array_equal(target, a[:, 1:3].astype(np.float16))


def test_nothing_is_read_that_is_not_in_the_box():
    held = Held(DATA)
    source = Stack((Concat((A, B)), Concat((C, B))))
    source.copy(held, (slice(1, 2), slice(2, 4), slice(0, 3)), np.empty((1, 2, 3), np.float32))
    assert held.boxes == [("c", (slice(2, 4), slice(0, 3)))]


@pytest.mark.parametrize("name", CASES)
def test_rows_say_which_tensors_are_used(name):
    source, whole = CASES[name]
    assert sum(np.prod(rows.shape) for rows in source.rows()) == whole.size
    for rows in source.rows():
        assert rows.tensor.shape == DATA[rows.tensor.name].shape


def test_parameters_are_tensors_of_their_name_or_fused_by_a_rule():
    names = CheckpointMap(rules={"qk_proj": concatenated("q_proj", "k_proj")})
    assert names.source("model.norm.weight", ((4,),)) == Tensor("model.norm.weight", (4,))
    assert names.source("head.weight", ((8, 4),)) == Tensor("head.weight", (8, 4))
    fused = names.source("layers.3.attn.qk_proj.bias", ((8,), (2,)))
    assert fused == Concat(
        (Tensor("layers.3.attn.q_proj.bias", (8,)), Tensor("layers.3.attn.k_proj.bias", (2,)))
    )


def test_a_family_may_add_rules_and_change_them():
    fused = CheckpointMap(rules={"qk_proj": concatenated("q_proj", "k_proj")})
    plain = fused.with_rules(qk_proj=lambda place: place.tensor("both", (10, 4)))
    assert plain.source("attn.qk_proj.weight", ((8, 4), (2, 4))) == Tensor(
        "attn.both.weight", (10, 4)
    )


def test_modules_may_have_other_names_in_the_checkpoint():
    names = CheckpointMap(
        rules={"qkv_proj": rotated_in_pairs(head_size=6, rotated=4)},
        renamed={"model": "transformer.decoder", "self_attn": "attention", "o_proj": "dense"},
        copies={"lm_head.weight": "model.embed_tokens.weight"},
    )
    path = "model.layers.3.self_attn"
    assert names.source(f"{path}.o_proj.bias", ((4,),)) == Tensor(
        "transformer.decoder.layers.3.attention.dense.bias", (4,)
    )
    query, key, value = (
        Tensor(f"transformer.decoder.layers.3.attention.{name}_proj.weight", (6, 4))
        for name in "qkv"
    )
    assert names.source(f"{path}.qkv_proj.weight", ((6, 4), (6, 4), (6, 4))) == Concat(
        (InHalves(query, 6, 4), InHalves(key, 6, 4), value)
    )
    copied = {"lm_head.weight": "transformer.decoder.embed_tokens.weight"}
    assert names.copied_tensors == copied


def test_the_layout_is_the_one_whose_embedding_is_there():
    inner = CheckpointMap(renamed={"model": "model.decoder"})
    names = CheckpointMap(renamed={"model": ""}, others=(inner,))
    assert names.for_tensors({"embed_tokens.weight": None, "layers.0.weight": None}) is names
    assert names.for_tensors({"model.decoder.embed_tokens.weight": None}) is inner
    # Then the error names the tensors of the first layout.
    assert names.for_tensors({"other.weight": None}) is names
