"""Finding and reading safetensors, whole or damaged."""

import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.files import read_json
from jaxllm.weights.checkpoint import Checkpoint, resolve_model_dir


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {
        "a": rng.standard_normal((3, 4)).astype(np.float32),
        "b": rng.standard_normal((5,)).astype(ml_dtypes.bfloat16),
        "c": rng.standard_normal((2, 2)).astype(np.float16),
    }


def write_shards(path, shards, weight_map=None):
    for file, tensors in shards.items():
        save_file(tensors, path / file)
    weight_map = weight_map or {name: file for file, part in shards.items() for name in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_raw(path, header, data=b""):
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def test_every_tensor_is_read_as_it_was_written(tensors, tmp_path):
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            read = checkpoint.read(name)
            assert read.dtype == tensor.dtype
            np.testing.assert_array_equal(read, tensor)


def test_tensors_can_be_read_again_after_release(tensors, tmp_path):
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        view = checkpoint.read("a")
        checkpoint.release("a")
        np.testing.assert_array_equal(view, tensors["a"])
        np.testing.assert_array_equal(checkpoint.read("a"), tensors["a"])


def test_shards_are_found_through_the_index(tensors, tmp_path):
    write_shards(tmp_path, {"1.safetensors": {"a": tensors["a"]}, "2.safetensors": tensors})
    # A file that the index does not name is not part of the model.
    (tmp_path / "2.safetensors").rename(tmp_path / "other.safetensors")
    write_shards(
        tmp_path,
        {"1.safetensors": {"a": tensors["a"]}, "2.safetensors": {"b": tensors["b"]}},
    )
    with Checkpoint(tmp_path) as checkpoint:
        assert {name: info.file.name for name, info in checkpoint.tensors.items()} == {
            "a": "1.safetensors",
            "b": "2.safetensors",
        }
        np.testing.assert_array_equal(checkpoint.read("b"), tensors["b"])


def test_missing_shard_is_named(tensors, tmp_path):
    write_shards(tmp_path, {"1.safetensors": {"a": tensors["a"]}, "2.safetensors": {}})
    write_shards(tmp_path, {"1.safetensors": {}}, {"a": "1.safetensors", "b": "gone.safetensors"})
    with pytest.raises(CheckpointError, match="1 of the 2 files.*gone.safetensors"):
        Checkpoint(tmp_path)


def test_index_that_disagrees_with_the_files_is_refused(tensors, tmp_path):
    write_shards(tmp_path, {"1.safetensors": tensors}, {"elsewhere": "1.safetensors"})
    with pytest.raises(CheckpointError, match="elsewhere in 1.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "..", "/etc/passwd"])
def test_index_cannot_reach_out_of_its_directory(tmp_path, name):
    write_shards(tmp_path, {}, {"a": name})
    with pytest.raises(CheckpointError, match="outside its directory"):
        Checkpoint(tmp_path)


def test_same_tensor_in_two_files_is_refused(tensors, tmp_path):
    save_file(tensors, tmp_path / "1.safetensors")
    save_file(tensors, tmp_path / "2.safetensors")
    with pytest.raises(CheckpointError, match="both in 1.safetensors and 2.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("kept", [4, 20, -1])
def test_truncated_file_is_refused_with_its_sizes(kept, tensors, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    with pytest.raises(CheckpointError, match=f"truncated.*it has {len(whole[:kept])} bytes"):
        Checkpoint(tmp_path)


def test_trailing_bytes_are_refused(tensors, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match="belong to no tensor"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]},
        {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]},
        "nonsense",
    ],
)
def test_damaged_header_is_refused(entry, tmp_path):
    write_raw(tmp_path / "model.safetensors", {"a": entry}, b"\0" * 8)
    with pytest.raises(CheckpointError, match="damaged header"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("second", [(0, 8), (2, 8), (6, 8)])
def test_tensors_that_overlap_or_leave_a_gap_are_refused(second, tmp_path):
    first, last = second
    header = {
        "a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        "b": {"dtype": "BF16", "shape": [(last - first) // 2], "data_offsets": [first, last]},
    }
    write_raw(tmp_path / "model.safetensors", header, b"\0" * 8)
    with pytest.raises(CheckpointError, match="damaged header: tensor [ab] does not begin where"):
        Checkpoint(tmp_path)


def test_file_that_is_not_safetensors_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"PK\3\4" + bytes(range(256)))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        Checkpoint(tmp_path)


def test_unsupported_type_is_refused_by_name(tmp_path):
    header = {"a": {"dtype": "F8_E5M2", "shape": [4], "data_offsets": [0, 4]}}
    write_raw(tmp_path / "model.safetensors", header, b"\0" * 4)
    with Checkpoint(tmp_path) as checkpoint:
        with pytest.raises(UnsupportedModelError, match="F8_E5M2; supported are F32, F16, BF16"):
            checkpoint.read("a")


def test_a_directory_with_gguf_beside_safetensors_is_that_of_safetensors(tmp_path):
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    for model in (file, tmp_path):
        with pytest.raises(CheckpointError, match="model-Q4_K_M.gguf is truncated"):
            resolve_model_dir(str(model))
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"")
    assert resolve_model_dir(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match=f"is a file; give its directory, '{tmp_path}'"):
        resolve_model_dir(str(other))


def test_pickled_weights_are_refused_with_a_remedy(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pytorch_model.bin.*convert it to safetensors"):
        Checkpoint(tmp_path)


def test_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="load_format='dummy'"):
        Checkpoint(tmp_path)


def test_local_directory_is_taken_as_it_is(tmp_path):
    assert resolve_model_dir(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["/not/there", "./gone", "not-there", "a/b/c"])
def test_path_that_does_not_exist_is_not_looked_for_on_the_hub(model):
    with pytest.raises(CheckpointError, match="no such directory"):
        resolve_model_dir(model)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "is missing"), ("{", "cannot be read as JSON"), ("[1]", "holds a list")],
)
def test_broken_json_is_refused(text, message, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 100_000,
        b'{"a": ' + b"[" * 100_000,
        b'{"a": {"dtype": "F32", "more": ' + b"[" * 100_000,
        b'{"__metadata__": ' + b'{"a":' * 100_000,
        b'{"a": 1',
        b'{"a\xff": {}}',
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 4000 + b'], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [' + b"9," * 99 + b'9], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": NaN, "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": 5, "shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_header_that_is_no_header_is_refused_in_one_line(raw, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(CheckpointError, match=f"{file} has a damaged header: ") as caught:
        Checkpoint(tmp_path)
    assert len(str(caught.value)) < 500 + len(str(file))


@pytest.mark.parametrize("name", [5, None, ["a"], "", "a\0b", "a" * 1000])
def test_index_that_names_no_files_is_refused(name, tmp_path):
    write_shards(tmp_path, {}, {"tensor": name})
    with pytest.raises(CheckpointError, match="names no file that has tensor tensor"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_pipe_in_the_place_of_weights_is_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is a pipe, not a regular file"):
        Checkpoint(tmp_path)
