"""Files from strangers: each defect is an error that names what is wrong."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import CheckpointError, JaxLLMError
from jaxllm.gguf.file import read_header
from jaxllm.gguf.model import open_model
from tests.gguf.files import write_pair


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def header(
    *, version=3, num_tensors=0, num_keys=0, body=b"", magic=b"GGUF", data=b"\0" * 4096
) -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_keys) + body + data


def tensor(name="t", sizes=(32,), kind=0, offset=0) -> bytes:
    axes = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + axes + struct.pack("<IQ", kind, offset)


DEFECTS = {
    "empty": (b"", "is truncated: it has 0 bytes"),
    "magic": (header(magic=b"GGML"), "is no GGUF file: it begins with b'GGML'"),
    "version": (header(version=1), "has version 1, which is not supported"),
    "byte order": (header(version=3 << 24), "is big-endian"),
    "keys": (header(num_keys=1 << 40), "keys are more than"),
    "tensors": (header(num_tensors=1 << 40), "tensors are more than"),
    "long string": (header(num_keys=1, body=struct.pack("<Q", 1 << 60)), "a string of .* bytes"),
    "cut string": (header(num_keys=1, body=struct.pack("<Q", 1 << 20)), "truncated: its header"),
    "bad string": (
        header(num_keys=1, body=struct.pack("<Q", 2) + b"\xff\xfe"), "a string is not UTF-8"
    ),
    "type": (header(num_keys=1, body=text("k") + struct.pack("<I", 77)), "unknown type 77"),
    "array": (
        header(num_keys=1, body=text("k") + struct.pack("<IIQ", 9, 4, 1 << 50)),
        "elements of 'k' are more than",
    ),
    "deep": (
        header(num_keys=1, body=text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 4),
        "unknown type 9",
    ),
    "twice": (
        header(num_keys=2, body=(text("k") + struct.pack("<IB", 0, 1)) * 2), "two values for 'k'"
    ),
    "alignment": (
        header(num_keys=1, body=text("general.alignment") + struct.pack("<II", 4, 3)),
        "general.alignment=3 must be a multiple of 8",
    ),
    "axes": (header(num_tensors=1, body=tensor(sizes=(1,) * 9)), "9 axes of tensor 't' are more"),
    "size": (header(num_tensors=1, body=tensor(sizes=(1 << 60,))), "sizes of 't' are more than"),
    "blocks": (header(num_tensors=1, body=tensor(sizes=(33,), kind=8)), "no whole blocks of 32"),
    "kind": (header(num_tensors=1, body=tensor(kind=16)), "has the type IQ2_XXS, which is not"),
    "unknown kind": (header(num_tensors=1, body=tensor(kind=99)), "has the type 99, which is not"),
    "outside": (header(num_tensors=1, body=tensor(sizes=(1 << 20,))), "truncated: tensor t ends"),
    "unaligned": (header(num_tensors=1, body=tensor(offset=5)), "begins at byte 5 of the data"),
    "overlap": (
        header(num_tensors=2, body=tensor("a") + tensor("b", offset=32)),
        "tensor b begins before the one before it ends",
    ),
    "same name": (
        header(num_tensors=2, body=tensor("a") + tensor("a", offset=128)), "two tensors are named"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_named(name, tmp_path):
    data, error = DEFECTS[name]
    file = tmp_path / "m.gguf"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=error):
        read_header(file)


def test_a_sound_header_is_read(tmp_path):
    file = tmp_path / "m.gguf"
    values = (
        text("a") + struct.pack("<If", 6, 0.5)
        + text("b") + struct.pack("<IB", 7, 1)
        + text("c") + struct.pack("<IIQ2i", 9, 5, 2, -1, 7)
        + text("d") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("yz")
    )  # fmt: skip
    file.write_bytes(header(num_keys=4, num_tensors=1, body=values + tensor("t", (4, 2))))
    found = read_header(file)
    assert found.metadata == {"a": 0.5, "b": True, "c": [-1, 7], "d": ["x", "yz"]}
    assert found.tensors["t"].shape == (2, 4)
    assert found.tensors["t"].offset % 32 == 0 and found.tensors["t"].num_bytes == 32


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    file, _ = write_pair(tmp_path_factory.mktemp("sound"), "llama")
    return file.read_bytes()


@settings(max_examples=150, deadline=None)
@given(
    at=st.integers(0, 3000),
    value=st.integers(0, 255),
    length=st.integers(0, 1 << 20),
    cut=st.booleans(),
)
def test_whatever_is_damaged_nothing_else_is_raised(
    sound, tmp_path_factory, at, value, length, cut
):
    data = bytearray(sound)
    data[at] = value
    file = tmp_path_factory.mktemp("damaged", numbered=True) / "m.gguf"
    file.write_bytes(data[:length] if cut else data)
    try:
        model = open_model(file)
        model.stored()
    except JaxLLMError as error:
        assert str(error)
