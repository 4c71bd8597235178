"""The files of sentence-transformers: both spellings of what they say, and what is refused."""

import json

import pytest

from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.pooling.files import read_sentence_model

OLD, NEW = "sentence_transformers.models.", "sentence_transformers.base.modules.pooling."


def write(path, modules, pooling=None, **files):
    listed = [{"idx": i, "path": where, "type": kind} for i, (where, kind) in enumerate(modules)]
    (path / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def pooled(path, kind=OLD, pooling=None, more=(), **files):
    modules = [("", OLD + "Transformer"), ("1_Pooling", kind + "Pooling"), *more]
    return write(path, modules, pooling or {"pooling_mode": "mean"}, **files)


@pytest.mark.parametrize("kind", [OLD, NEW])
@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"pooling_mode": "mean"}, "MEAN"),
        ({"pooling_mode": ["lasttoken"], "include_prompt": True}, "LAST"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "CLS"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}, "MEAN"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "LAST"),
    ],
)
def test_a_pooling_in_both_spellings(tmp_path, kind, said, meant):
    found = read_sentence_model(pooled(tmp_path, kind, said))
    assert (found.seq_pooling, found.normalizes, found.denses) == (meant, False, ())


def test_what_else_is_read(tmp_path):
    told = {"prompts": {"query": "q: ", "document": ""}, "truncate_dim": 32}
    limits = {"max_seq_length": 256, "do_lower_case": False}
    path = pooled(
        tmp_path,
        more=[("2_Normalize", OLD + "Normalize")],
        config_sentence_transformers=told,
        sentence_bert_config=limits,
    )
    found = read_sentence_model(path)
    assert found.normalizes and found.max_seq_length == 256 and found.truncate_dim == 32
    assert found.prompts == (("query", "q: "), ("document", ""))


def test_models_without_a_pooling_are_none(tmp_path):
    assert read_sentence_model(tmp_path) is None
    assert read_sentence_model(write(tmp_path, [("", OLD + "Transformer")])) is None


@pytest.mark.parametrize(
    ("more", "said", "error", "message"),
    [
        ([("2_CNN", OLD + "CNN")], None, UnsupportedModelError, "CNN"),
        ([], {"pooling_mode_max_tokens": True}, UnsupportedModelError, "max"),
        ([], {"pooling_mode": ["mean", "cls"]}, UnsupportedModelError, "mean"),
        ([], {"pooling_mode": "cls", "include_prompt": False}, UnsupportedModelError, "include"),
        ([("../2_Dense", OLD + "Dense")], None, CheckpointError, "leaves"),
        ([("2", 3)], None, CheckpointError, "type and path"),
    ],
)
def test_refusals_name_the_file(tmp_path, more, said, error, message):
    path = pooled(tmp_path, pooling=said, more=more)
    with pytest.raises(error, match=message) as caught:
        read_sentence_model(path)
    assert str(tmp_path) in str(caught.value)
