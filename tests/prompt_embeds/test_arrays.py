"""What is read as embeddings, and what is refused before anything is made of it."""

import json

import ml_dtypes
import numpy as np
import pytest

from jaxllm.errors import ValidationError
from jaxllm.frontend.prompt_length import PromptLength
from jaxllm.prompt_embeds.arrays import take_embeds
from jaxllm.prompt_embeds.item import EmbedsSpec
from tests.prompt_embeds.models import in_base64, numpy_file, safetensors_file

SPEC = EmbedsSpec(hidden_size=8, dtype="float32", first_row=0)
LENGTH = PromptLength(64)
BLOCK = 16
ARRAY = np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32)


def taken(given, spec=SPEC, length=LENGTH):
    prompt, item = take_embeds({"prompt_embeds": given}, spec, length, BLOCK)
    data = np.frombuffer(item.data, np.dtype(getattr(ml_dtypes, spec.dtype, spec.dtype)))
    assert prompt == {"prompt_token_ids": [0] * (len(data) // spec.hidden_size)}
    return data.reshape(-1, spec.hidden_size), item


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_arrays_and_files_say_the_same(dtype, kept):
    torch = pytest.importorskip("torch")
    array = ARRAY.astype(dtype)
    spec = EmbedsSpec(hidden_size=8, dtype=kept, first_row=0)
    expected = array.astype(kept)
    ways = [array, array[None], safetensors_file(array)]
    if dtype != "bfloat16":  # which NumPy writes without its name
        ways += [numpy_file(array), numpy_file(np.asfortranarray(array)), torch.from_numpy(array)]
    for given in ways:
        given = in_base64(given) if isinstance(given, bytes) else given
        assert np.array_equal(taken(given, spec)[0], expected)


def test_blocks_are_known_by_their_content():
    _, item = taken(ARRAY)
    other = ARRAY.copy()
    other[17, 3] += 1
    _, changed = taken(other)
    assert [item.digest(block) == changed.digest(block) for block in range(3)] == [
        True,
        False,
        True,
    ]
    assert item.digest(0) and item.digest(1) and not item.digest(2)
    _, shorter = taken(ARRAY[:18])
    assert shorter.digest(0) == item.digest(0) and shorter.digest(1) != item.digest(1)


def safetensors_with(data=b"\0" * 32, **tensor):
    fields = {"dtype": "F32", "shape": [1, 8], "data_offsets": [0, len(data)]} | tensor
    header = json.dumps({"prompt": fields}).encode()
    return len(header).to_bytes(8, "little") + header + data


def torch_file():
    return b"PK\x03\x04" + b"\0" * 60


NUMPY = numpy_file(ARRAY)
REFUSED = [
    (ARRAY[:, :7], r"must be \[tokens, 8\]"),
    (ARRAY[0], "at least one token"),
    (ARRAY[:0], "at least one token"),
    (ARRAY[None, None], "at least one token"),
    (ARRAY.astype(np.int32), "float16, bfloat16 and float32"),
    (ARRAY.astype(object), "float16, bfloat16 and float32"),
    (np.where(ARRAY == ARRAY[3, 3], np.nan, ARRAY), "must be finite"),
    (np.full((2, 8), 1e300), "must be finite"),
    (np.zeros((64, 8), np.float32), "has 64 embeddings, .* at most 63"),
    (ARRAY.tolist(), "must be an array"),
    (b"bytes", "must be an array"),
    ("not base64!", "not base64"),
    ("é", "not base64"),
    ("A" * 10**6, "more than 63 embeddings of 8 numbers"),
    ("", "of no known form"),
    (torch_file(), "torch.save hold code"),
    (b"\x80\x02cos\nsystem\n", "torch.save hold code"),
    (numpy_file(ARRAY.astype(ml_dtypes.bfloat16)), "send bfloat16 as safetensors"),
    (numpy_file(ARRAY.astype(np.int64)), "float16, bfloat16 and float32"),
    (NUMPY[:-1], "where float32 needs 640"),
    (NUMPY + b"\0", "where float32 needs 640"),
    (NUMPY[:40], "as numpy.save writes it"),
    (NUMPY.replace(b"(20, 8)", b"(2000000000, 8)"), "where float32 needs"),
    (NUMPY.replace(b"(20, 8)", b"(        )"), "where float32 needs 4"),
    (NUMPY.replace(b"'<f4'", b"'|O8'"), "float16, bfloat16 and float32"),
    (NUMPY[:8] + b"\xff\xff" + NUMPY[10:], "of shape"),
    (b"\x93NUMPY", "as numpy.save writes it"),
    (b"\xff" * 64, "of no known form"),
    (b"\x08" + b"\0" * 7 + b"[1, 2]  ", "of no known form"),
    (safetensors_file(ARRAY, other=ARRAY), "2 tensors.*must have one"),
    (safetensors_with(dtype="I64"), "float16, bfloat16 and float32"),
    (safetensors_with(shape=[4, 8]), "where float32 needs 128"),
    (safetensors_with(shape=[-1, -8]), "of shape"),
    (safetensors_with(shape=[1] * 100, data=b"\0" * 4), r"must be \[tokens, hidden size\]"),
    (safetensors_with(shape=[0, 10**18], data=b""), r"must be \[tokens, hidden size\]"),
    (safetensors_with(shape=[10**18] * 3000), r"must be \[tokens, hidden size\]"),
    (safetensors_with(shape="all"), "of no known form"),
    (safetensors_with(data_offsets=[0, 1 << 40]), "not all that follows"),
    (safetensors_with(data_offsets=[8, 32]), "not all that follows"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "reason"), REFUSED)
def test_what_is_no_prompt_is_refused(given, reason):
    with pytest.raises(ValidationError, match=reason) as error:
        taken(in_base64(given) if isinstance(given, bytes) and given != b"bytes" else given)
    assert error.value.parameter == "prompt_embeds"
    assert len(str(error.value)) < 300


def test_a_prompt_has_nothing_beside_them():
    for name in ("prompt", "prompt_token_ids", "multi_modal_data"):
        with pytest.raises(ValidationError, match=f"{name}=.*nothing else"):
            take_embeds({"prompt_embeds": ARRAY, name: "x"}, SPEC, LENGTH, BLOCK)
    with pytest.raises(ValidationError, match="truncate_prompt_tokens"):
        take_embeds({"prompt_embeds": ARRAY}, SPEC, PromptLength(64, 8), BLOCK)
    with pytest.raises(ValidationError, match="enable_prompt_embeds=True"):
        take_embeds({"prompt_embeds": ARRAY}, None, LENGTH, BLOCK)
    for prompt in ("text", [1, 2], {"prompt": "x"}, {"prompt": "x", "prompt_embeds": None}):
        found, item = take_embeds(prompt, SPEC, LENGTH, BLOCK)
        assert item is None and found == ({"prompt": "x"} if isinstance(prompt, dict) else prompt)
