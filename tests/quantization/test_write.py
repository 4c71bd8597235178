"""Checkpoints of codes that are written here are those that compressed-tensors reads."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxllm.cli.main import main
from jaxllm.errors import UnsupportedModelError
from jaxllm.models.registry import family_names
from jaxllm.quantization.write import FORMATS, pack, write_quantized
from jaxllm.testing import make_tiny_checkpoint
from tests.draws import ENCODERS
from tests.models.conftest import SingleRow

PROMPT = [5, 77, 201, 9, 300, 41, 8, 123, 64, 250, 17]
MOST = {"int8": 0.01, "fp8": 0.03, "int4": 0.12}  # relative errors of normal weights
GROUP = 32
# Rotated pairs are neighbours in checkpoints, and lie in halves once loaded: in layers of queries,
# keys and values, and in latent ones. Llama 4 has all experts of a layer in two tensors.
ALWAYS = ("cohere", "deepseek_v3", "llama4")
# Weights that lie [in, out], or experts in one tensor that have no names of their own.
REFUSED = ("gpt2", "gpt_oss", "granitemoe", "granitemoehybrid")


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_written_is_what_the_oracle_reads(kind, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    source = make_tiny_checkpoint(tmp_path / "source")
    written = write_quantized(source, tmp_path / "out", kind, group_size=GROUP)
    assert len(written.errors) == 14
    assert all(MOST[kind] / 10 < its.relative < MOST[kind] for its in written.errors)
    assert written.bytes_after < 0.6 * written.bytes_before
    unpacks = transformers.CompressedTensorsConfig(run_compressed=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=unpacks
    )
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    ours = SingleRow(tmp_path / "out")
    np.testing.assert_allclose(ours.logits(PROMPT), expected, atol=1e-3, rtol=0)
    weight = ours.weights["model"]["layers"][0]["mlp"]["down_proj"]["weight"]
    assert weight.dtype == {"int8": np.int8, "int4": np.uint8}.get(kind, ml_dtypes.float8_e4m3fn)


def test_codes_are_packed_from_the_lowest_bits():
    codes = np.arange(-8, 8, dtype=np.int8)[None]
    assert pack(codes, 4).view(np.uint32).tolist() == [[0x76543210, 0xFEDCBA98]]
    of_8_bits = np.array([[-128, -1, 0, 127]], np.int8)
    assert pack(of_8_bits, 8).view(np.uint32).tolist() == [[0xFF807F00]]


def test_experts_are_written_and_what_is_left_is_named(tmp_path):
    source = make_tiny_checkpoint(tmp_path / "source", "qwen3_moe", hidden_size=64)
    written = write_quantized(source, tmp_path / "out", "int8")
    names = {error.name for error in written.errors}
    assert "model.layers.1.mlp.experts.3.gate_proj" in names
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    assert "model.layers.1.mlp.gate" in ignored and "lm_head" in ignored
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.1.mlp.gate.weight"].dtype == np.float32
    np.testing.assert_allclose(
        SingleRow(tmp_path / "out").logits(PROMPT), SingleRow(source).logits(PROMPT), atol=0.5
    )


@pytest.mark.parametrize(
    "family",
    [
        family if family in ALWAYS else pytest.param(family, marks=pytest.mark.sweep)
        for family in family_names()
        if family not in (*ENCODERS, *REFUSED)
    ],
)
def test_what_is_written_answers_as_what_is_quantised_at_load(family, tmp_path):
    source = make_tiny_checkpoint(tmp_path / "source", family)
    write_quantized(source, tmp_path / "out", "int8")
    expected = SingleRow(source, quantization="int8").logits(PROMPT)
    np.testing.assert_allclose(SingleRow(tmp_path / "out").logits(PROMPT), expected, atol=1e-4)


@pytest.mark.parametrize("family", REFUSED)
def test_what_could_not_be_read_is_not_written(family, tmp_path):
    source = make_tiny_checkpoint(tmp_path / "source", family)
    with pytest.raises(UnsupportedModelError, match="jaxllm convert --quantization"):
        write_quantized(source, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


def test_a_group_that_divides_only_some_matrices_of_experts_is_refused(tmp_path):
    source = make_tiny_checkpoint(tmp_path / "source", "llama4", intermediate_size=48)
    match = "the 48 inputs of .*experts.down_proj are no multiple of --group-size 32"
    with pytest.raises(UnsupportedModelError, match=match):
        write_quantized(source, tmp_path / "out", "int4", group_size=32)


def test_the_command_reports_and_refuses_what_it_cannot_do(tmp_path, capsys):
    source = str(make_tiny_checkpoint(tmp_path / "source"))
    report, plot = tmp_path / "report.json", tmp_path / "plot.svg"
    flags = ["--format", "fp8", "--report", str(report), "--plot", str(plot)]
    assert main(["quantize", source, str(tmp_path / "out"), *flags]) == 0
    assert "14 weights in fp8, 7 tensors as they were" in capsys.readouterr().out
    assert len(json.loads(report.read_text())["errors"]) == 14
    assert plot.read_text().startswith("<svg")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    for arguments, error in (
        ([source, str(tmp_path / "out"), "--format", "int8"], "is not empty"),
        ([str(tmp_path / "out"), str(tmp_path / "two"), "--format", "int8"], "quantised already"),
        (
            [source, str(tmp_path / "two"), "--format", "int4", "--group-size", "12"],
            "multiple of 8",
        ),
        (
            [source, str(tmp_path / "two"), "--format", "int4", "--group-size", "256"],
            "no weights [out, in] of linear layers",
        ),
    ):
        assert main(["quantize", *arguments]) == 2
        assert error in capsys.readouterr().err
