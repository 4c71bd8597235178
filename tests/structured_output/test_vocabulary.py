"""The vocabulary of grammars is that of the model and its tokenizer, whichever is the larger."""

import json
import shutil

import pytest

from jaxllm.config import ModelConfig
from jaxllm.errors import ValidationError
from jaxllm.structured_output.vocabulary import load_vocabulary, num_words


@pytest.fixture
def copy_of(model_dir, tmp_path):
    """A copy of the model's directory with changed files."""

    def copy_of(**changes):
        target = tmp_path / "copy"
        shutil.copytree(model_dir, target)
        for name, change in changes.items():
            file = target / f"{name}.json"
            value = json.loads(file.read_text())
            change(value)
            file.write_text(json.dumps(value))
        return str(target)

    return copy_of


def load(directory, info, **fields):
    return load_vocabulary(ModelConfig(model=directory, **fields), info)


def test_it_has_the_bytes_of_each_token(vocabulary, tokenizer):
    for text in ("return the blocks", " é€😀", '{"a": [1, null]}'):
        ids = tokenizer.encode(text).ids
        assert vocabulary.tokenizer.decode_bytes(ids) == text.encode()
    assert vocabulary.size == vocabulary.tokenizer.vocab_size == 384
    assert vocabulary.num_words == 12 and num_words(385) == 13
    assert vocabulary.tokenizer.eos_tokens == [0]


def test_engines_of_one_model_share_it(vocabulary, model_dir, info_of):
    assert load(model_dir, info_of(model_dir)) is vocabulary


def test_all_ends_of_sequence_are_ends(model_dir, info_of):
    ends = load(model_dir, info_of(model_dir, eos_token_ids=(2, 1))).tokenizer.eos_tokens
    assert sorted(ends) == [0, 1, 2], "the one of the tokenizer's config is missing"


def test_a_head_may_have_more_rows_than_the_tokenizer_has_tokens(model_dir, info_of):
    its = load(model_dir, info_of(model_dir, vocab_size=500, eos_token_ids=(0, 450)))
    assert its.size == its.tokenizer.vocab_size == 500
    assert its.tokenizer.eos_tokens == [0]  # 450 is no token, so it cannot end anything


def test_a_tokenizer_may_have_added_tokens_that_the_head_lacks(copy_of, info_of):
    token = {"id": 384, "content": "<image>", "special": True, "single_word": False}
    token |= {"lstrip": False, "rstrip": False, "normalized": False}
    directory = copy_of(tokenizer=lambda value: value["added_tokens"].append(token))
    assert load(directory, info_of(directory)).tokenizer.vocab_size == 384
    wide = load(directory, info_of(directory, vocab_size=400))
    assert wide.tokenizer.is_special_token(384)


def test_tokens_that_only_the_config_of_the_tokenizer_adds_are_there(copy_of, info_of):
    added = {"384": {"content": "<tool_call>", "special": False, "normalized": False}}
    directory = copy_of(tokenizer_config=lambda value: value.update(added_tokens_decoder=added))
    its = load(directory, info_of(directory, vocab_size=400))
    assert its.tokenizer.decode_bytes([384]) == b"<tool_call>"


def test_a_tokenizer_of_a_directory_of_its_own(model_dir, tmp_path, info_of):
    its = load(str(tmp_path), info_of(str(tmp_path)), tokenizer=model_dir)
    assert its.tokenizer.decode_bytes([0]) != b""


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda file: file.unlink(), "has no tokenizer.json"),
        (lambda file: file.write_text("{}"), "does not say which bytes"),
        (lambda file: file.write_text("not JSON"), "does not say which bytes"),
    ],
)
def test_without_a_tokenizer_it_is_refused_by_name(copy_of, info_of, tmp_path, break_it, reason):
    directory = copy_of()
    break_it(tmp_path / "copy" / "tokenizer.json")
    with pytest.raises(ValidationError, match=reason) as caught:
        load(directory, info_of(directory))
    assert caught.value.parameter == "structured_outputs"
    assert "structured_outputs" in str(caught.value)


def test_an_engine_without_a_tokenizer_refuses_it(model_dir, info_of):
    with pytest.raises(ValidationError, match="skip_tokenizer_init=True"):
        load(model_dir, info_of(model_dir), skip_tokenizer_init=True)
