"""Parts of checkpoints that a decoder does without are left out, and the log says so."""

import logging

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.testing import make_tiny_checkpoint
from tests.models.conftest import assert_same_model


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("deepseek_v3", "model.layers.2.eh_proj.weight"),  # drafts tokens, behind the last layer
        ("deepseek_v32", "model.layers.1.self_attn.indexer.wk.weight"),
    ],
)
def test_a_part_is_left_out(family, extra, tmp_path, single_row, caplog):
    path = make_tiny_checkpoint(tmp_path, family)
    expected = single_row(path)
    tensors = load_file(path / "model.safetensors") | {extra: np.ones((2, 3), np.float32)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.INFO):
        assert_same_model(single_row(path), expected)
    assert "left out 1 tensor of the checkpoint" in caplog.text and extra in caplog.text
