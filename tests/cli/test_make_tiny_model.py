"""The model of the README's first command."""

import json

from jaxllm.cli.main import main


def test_writes_a_checkpoint_of_the_family_asked_for(tmp_path):
    assert main(["make-tiny-model", str(tmp_path / "model"), "--family", "qwen3"]) == 0
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_writes_over_nothing(tmp_path, capsys):
    (tmp_path / "model.safetensors").write_text("years of work")
    assert main(["make-tiny-model", str(tmp_path)]) == 2
    assert "is not empty; give a new directory" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_text() == "years of work"
