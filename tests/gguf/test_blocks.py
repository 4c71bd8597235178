"""Blocks say what the gguf package says that they say."""

import gguf
import numpy as np
import pytest

from jaxllm.gguf.blocks import NAMES, TYPES, values

CODED = [kind for kind, its in TYPES.items() if its.codes is not None]


def random_blocks(kind: int, count: int, seed: int = 0, size: float = 0.1) -> np.ndarray:
    """Blocks of any bits, whose scales are up to a size."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (count, TYPES[kind].num_bytes), np.uint8)
    name = NAMES[kind]
    if name == "MXFP4":
        data[:, 0] = 127 + int(np.log2(size)) + rng.integers(-2, 2, count)
        return data
    last = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
    places = last.get(name, (0, 2) if TYPES[kind].codes.has_offsets else (0,))
    for place in places:
        scales = rng.uniform(-size, size, count).astype("<f2")
        data[:, place : place + 2] = scales.view(np.uint8).reshape(count, 2)
    return data


@pytest.mark.parametrize("kind", CODED, ids=lambda kind: NAMES[kind])
def test_values_are_those_of_the_oracle(kind):
    data, its = random_blocks(kind, 50), TYPES[kind]
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind))
    decoded = its.decode(data)
    assert decoded.codes.shape == (50, its.size)
    assert decoded.codes.dtype == (np.int8 if its.codes.kind == "int8" else np.uint8)
    assert decoded.scales.shape == (50, its.size // its.codes.group)
    assert (decoded.offsets is not None) == its.codes.has_offsets
    assert decoded.codes.dtype == np.int8 or decoded.codes.max() < 16
    found = values(decoded, its.codes)
    np.testing.assert_allclose(found, expected.reshape(50, -1), rtol=0, atol=1e-5)


def test_names_and_sizes_are_those_of_the_oracle():
    sizes = gguf.constants.GGML_QUANT_SIZES
    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert {kind: name for kind, name in NAMES.items() if kind in known}.items() <= known.items()
    for kind, its in TYPES.items():
        assert sizes[gguf.GGMLQuantizationType(kind)] == (its.size, its.num_bytes)
