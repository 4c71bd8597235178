"""Damaged files of a tokenizer: each ends in one line that says which file, and what is wrong."""

import json
import os

import pytest

from jaxllm import bundled
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError
from jaxllm.frontend.tokenizer import load_tokenizer
from jaxllm.testing import make_tiny_checkpoint

DEEP = "[" * 100_000
TOKENIZER = json.loads((bundled.path(bundled.MODEL) / "tokenizer.json").read_text())
FIRST = TOKENIZER["added_tokens"][0]


def changed(**fields):
    return json.dumps(TOKENIZER | fields)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model_dir(whole, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content", "defect"),
    [
        ("tokenizer.json", "", "cannot be read as JSON: Expecting value"),
        ("tokenizer.json", '{"hello":1}', "describes no tokenizer: it has no object 'model'"),
        ("tokenizer.json", "[]", "holds a list, not a JSON object"),
        ("tokenizer.json", changed()[:5000], "cannot be read as JSON: Expecting value"),
        ("tokenizer.json", b"\xff\xfe{}", "cannot be read as JSON: 'utf-8' codec"),
        ("tokenizer.json", '{"added_tokens":' + DEEP, "nested deeper than 64 levels"),
        ("tokenizer.json", changed(added_tokens=float("nan")), "has no list 'added_tokens'"),
        ("tokenizer.json", changed(added_tokens=[1]), "1 in added_tokens must be an object"),
        ("tokenizer.json", changed(added_tokens=[FIRST | {"id": 2**40}]), "integer `109951162777"),
        ("tokenizer.json", changed(model={"type": "BPE", "vocab": []}), "describes no tokenizer"),
        ("tokenizer.json", changed(version="9"), "Unknown tokenizer version"),
        ("tokenizer_config.json", "", "cannot be read as JSON"),
        ("tokenizer_config.json", DEEP, "nested deeper than 64 levels"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template=5 must be a string"),
        ("tokenizer_config.json", '{"model_max_length": "x"}', "model_max_length='x' must be"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}', "tokenizer_class=5 must be a name"),
        ("special_tokens_map.json", "[]", "holds a list, not a JSON object"),
        ("special_tokens_map.json", '{"eos_token": 5}', "does not fit its tokenizer.json"),
        ("added_tokens.json", DEEP, "nested deeper than 64 levels"),
        ("chat_template.jinja", b"\xff\xfe", "is not UTF-8"),
        ("chat_template.jinja", " " * (2 << 20), "is longer than 1048576 bytes"),
        ("chat_template.json", '{"chat_template": 5}', "chat_template=5 must be a string"),
        ("config.json", "", "cannot be read as JSON"),
        ("config.json", DEEP, "nested deeper than 64 levels"),
    ],
)
def test_a_damaged_file_is_named_with_its_defect(name, content, defect, model_dir):
    data = content if isinstance(content, bytes) else content.encode()
    (model_dir / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=defect) as caught:
        load_tokenizer(ModelConfig(model="m"), str(model_dir))
    assert str(model_dir / name) in str(caught.value)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tekken.json", "only in tekken.json, the format of mistral-common.*pass tokenizer="),
        ("qwen.tiktoken", "only in qwen.tiktoken, which does not say .*trust_remote_code=True"),
        ("tiktoken.model", "only in tiktoken.model, which does not say .*trust_remote_code=True"),
    ],
)
def test_a_tokenizer_of_a_format_that_is_not_read_is_refused_by_name(name, message, model_dir):
    config = ModelConfig(model="m")
    (model_dir / name).write_text("{}")
    assert load_tokenizer(config, str(model_dir)).encode("x")  # from the other files
    for other in ("tokenizer.json", "tokenizer_config.json"):
        (model_dir / other).unlink()
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(config, str(model_dir))


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "added_tokens.json", "chat_template.jinja", "additional_chat_templates/tools.jinja",
        "tokenizer.model", "vocab.json", "merges.txt", "tokenizer.v4.json",
    ],
)  # fmt: skip
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name, model_dir):
    (model_dir / name).unlink(missing_ok=True)
    (model_dir / name).parent.mkdir(exist_ok=True)
    os.mkfifo(model_dir / name)
    with pytest.raises(CheckpointError, match=f"{name} is a pipe, not a regular file"):
        load_tokenizer(ModelConfig(model="m"), str(model_dir))
