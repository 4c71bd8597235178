"""Models in GGUF files compute what checkpoints with the same weights compute."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.files import read_json
from jaxllm.models.architecture import read_architecture
from jaxllm.weights.checkpoint import open_checkpoint, resolve_model_dir
from tests.gguf.files import FAMILIES, write_pair
from tests.models.conftest import SingleRow

PROMPT = [5, 77, 201, 9, 300, 41, 8, 123, 64, 250, 17]


def logits_of(path, **more):
    return SingleRow(resolve_model_dir(str(path)), **more).logits(PROMPT)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_are_those_of_the_checkpoint(architecture, tmp_path):
    file, plain = write_pair(tmp_path, architecture)
    np.testing.assert_allclose(logits_of(file), logits_of(plain), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_floats_of_16_bits_are_read(kind, tmp_path):
    file, plain = write_pair(tmp_path, "llama", lambda name: kind)
    config = read_json(resolve_model_dir(str(file)) / "config.json")
    assert config["dtype"] == {"F16": "float16", "BF16": "bfloat16"}[kind]
    np.testing.assert_allclose(logits_of(file), logits_of(plain), atol=1e-4, rtol=0)


def mixed(name: str) -> str:
    """As files of many types have it: other ones for values and down projections."""
    if "attn_v" in name or "ffn_down" in name:
        return "Q6_K"
    return "F32" if "token_embd" in name else "Q4_K"


WIDE = {"hidden_size": 256, "intermediate_size": 256}
# The type of tensors, by their names; architecture; fields; and the codes of q, k and v in layer 0.
CODED = {
    "Q8_0": (lambda name: "Q8_0", "llama", {}, np.int8),
    "Q4_0": (lambda name: "Q4_0", "qwen2", {}, np.uint8),
    "Q5_1 and Q4_1": (lambda n: "Q5_1" if "_v" in n else "Q4_1", "gemma2", {}, np.int8),
    "Q4_K and Q6_K": (mixed, "llama", WIDE, np.int8),
    "Q4_K": (lambda name: "Q4_K", "llama", WIDE, np.uint8),
    "MXFP4 beside Q8_0": (
        lambda name: "MXFP4" if "exps" in name else "Q8_0",
        "qwen3moe", {"hidden_size": 64, "moe_intermediate_size": 32}, np.int8,
    ),
    "MXFP4 and IQ4_NL": (
        lambda name: "IQ4_NL" if "down" in name or "_v" in name else "MXFP4",
        "mixtral", {"hidden_size": 64, "intermediate_size": 32}, np.int8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CODED)
def test_logits_are_those_of_the_weights_that_blocks_stand_for(name, tmp_path):
    type_of, architecture, fields, codes = CODED[name]
    file, plain = write_pair(tmp_path, architecture, type_of, **fields)
    model = SingleRow(resolve_model_dir(str(file)))
    expected = SingleRow(plain).logits(PROMPT)
    np.testing.assert_allclose(model.logits(PROMPT), expected, atol=1e-3, rtol=0)
    # No matrix is there as floats but routers, and what groups share.
    layer = model.weights["model"]["layers"][0]
    assert layer["self_attn"]["qkv_proj"]["weight"].dtype == codes
    for path, leaf in jax.tree.leaves_with_path(layer):
        name = jax.tree_util.keystr(path)
        if leaf.ndim > 1 and not any(its in name for its in ("_scale", "_offset", "gate'")):
            assert leaf.dtype in (np.int8, np.uint8), name


ON_DEVICES = """
import os, sys
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
os.environ["JAX_PLATFORMS"] = "cpu"

import json
import numpy as np
from tests.gguf.test_models import logits_of

for file, *ways in json.loads(sys.argv[1]):
    whole = logits_of(file)
    for way in ways:
        np.testing.assert_allclose(logits_of(file, **way)[:, :384], whole, atol=1e-4, rtol=0)
print("equal")
"""


def test_logits_do_not_depend_on_the_number_of_devices(tmp_path):
    """Of blocks of 256 a device has a part; experts are in one tensor."""
    files = []
    for name in ("Q4_K and Q6_K", "MXFP4 beside Q8_0"):
        type_of, architecture, fields, _ = CODED[name]
        file, _ = write_pair(
            tmp_path / architecture, architecture, type_of, **fields, num_hidden_layers=1
        )
        spread = {"num_shards": 4, "spreads_experts": architecture == "qwen3moe"}
        files.append([str(file), {"num_shards": 2}, spread])
    process = subprocess.run(
        [sys.executable, "-c", ON_DEVICES, json.dumps(files)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout.endswith("equal\n"), process.stderr[-3000:]


def test_frequencies_of_llama_3_are_read(tmp_path):
    """Written as the factors by which they are divided."""
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    file, plain = write_pair(tmp_path, "llama", rope_scaling=rope)
    np.testing.assert_allclose(logits_of(file), logits_of(plain), atol=1e-4, rtol=0)


def test_a_model_in_several_files_is_whole_from_any_of_them(tmp_path):
    file, plain = write_pair(tmp_path, "llama", parts=3)
    expected = logits_of(plain)
    np.testing.assert_allclose(logits_of(file), expected, atol=1e-4, rtol=0)
    second = file.with_name(file.name.replace("-00001-", "-00002-"))
    assert resolve_model_dir(str(second)) == resolve_model_dir(str(file))
    second.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(
        CheckpointError, match="one of 3 files of a model, and 1 of them are missing"
    ):
        resolve_model_dir(str(file))
    with pytest.raises(CheckpointError, match="is one of 3 files of a model; give it the name"):
        resolve_model_dir(str(tmp_path / "elsewhere.gguf"))


def test_a_directory_with_one_model_is_that_model(tmp_path):
    first, _ = write_pair(tmp_path / "a", "llama")
    assert resolve_model_dir(str(first.parent)) == resolve_model_dir(str(first))
    write_pair(tmp_path / "b", "llama")[0].rename(first.with_name("other.gguf"))
    with pytest.raises(CheckpointError, match="several models.*model.gguf, other.gguf"):
        resolve_model_dir(str(first.parent))


def test_a_changed_file_is_read_again(tmp_path, gguf_cache):
    file, _ = write_pair(tmp_path, "llama")
    before = resolve_model_dir(str(file))
    assert resolve_model_dir(str(file)) == before and before.parent == gguf_cache
    assert before.stat().st_mode & 0o077 == 0
    write_pair(tmp_path, "llama", hidden_size=96)
    after = resolve_model_dir(str(file))
    assert after != before
    assert read_json(after / "config.json")["hidden_size"] == 96


@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' are not supported"),
        ({"llama.attention.head_count": "four"}, "head_count='four' must be a whole number"),
        ({"llama.attention.head_count": 0}, "head_count=0 must be from 1 to"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv differs between layers"),
        ({"llama.attention.value_length": 8}, "value_length=8 is not supported beside keys of"),
        ({"llama.rope.dimension_count": 8}, "dimension_count=8 is not supported beside heads"),
        ({"llama.rope.scaling.type": "spiral"}, "rope.scaling.type='spiral' is not supported"),
        ({"llama.attention.temperature": 2.0}, "attention.temperature=2.0 is not supported: noth"),
        ({"llama.attention.causal": False}, "attention.causal=False is not supported"),
    ],
)
def test_metadata_that_is_wrong_or_unknown_is_refused_by_name(metadata, error, tmp_path):
    file, _ = write_pair(tmp_path, "llama", metadata=metadata)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=error):
        resolve_model_dir(str(file))


def test_config_and_tensors_that_disagree_are_refused(tmp_path):
    file, _ = write_pair(tmp_path, "llama", metadata={"llama.feed_forward_length": 160})
    with pytest.raises(CheckpointError, match="disagree in .* shapes; config.json asks for"):
        logits_of(file)


def test_boxes_of_tensors_are_those_of_the_whole(tmp_path):
    """Of any rows and columns: within blocks, of pairs that are put in halves, of one expert."""
    file, plain = write_pair(tmp_path, "mixtral", lambda name: "Q8_0", intermediate_size=64)
    rng = np.random.default_rng(0)
    with (
        open_checkpoint(resolve_model_dir(str(file))) as ours,
        open_checkpoint(plain) as expected,
    ):
        assert ours.tensors.keys() == expected.tensors.keys()
        for name in ours.tensors:
            whole = expected.read(name)
            edges = [sorted(rng.integers(0, size + 1, 2)) for size in whole.shape]
            for box in (
                tuple(slice(0, size) for size in whole.shape),
                tuple(slice(int(a), int(b)) for a, b in edges),
            ):
                target = np.empty(whole[box].shape, np.float32)
                ours.copy(name, box, target)
                np.testing.assert_allclose(target, whole[box], atol=1e-6)


def test_experts_of_a_file_are_its_own(tmp_path):
    file, _ = write_pair(tmp_path, "qwen3moe")
    config = read_json(resolve_model_dir(str(file)) / "config.json")
    assert read_architecture(config).layers[0].ffns[0].num_experts == 8
