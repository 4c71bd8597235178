"""The tokenizer that a run trains, and conversations in its template."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jaxllm.errors import ValidationError
from jaxllm.training.chat_examples import examples
from jaxllm.training.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

SOURCE = '''
class Queue:
    def push(self, item, *, front=False):
        """Add an item.

        More about it.
        """
        self.items.append(item)

    def pop(self):
        """Take one
        away."""
        return self.items.pop()

    def silent(self):
        return None
'''


def make() -> Tokenizer:
    return train_tokenizer([SOURCE] * 3, 300)


TOKENIZER = make()


@given(st.text())
def test_any_text_survives(text):
    TOKENIZER.encode_special_tokens = True
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_indentation_is_one_piece_with_its_line_break():
    pieces = TOKENIZER.pre_tokenizer.pre_tokenize_str("x = 12345\n        return  y_z")
    assert [SOURCE_CHARS(piece) for piece, _ in pieces] == [
        "x", " =", " ", "123", "45", "\n        ", "return", " ", " y", "_z"
    ]  # fmt: skip


def SOURCE_CHARS(piece: str) -> str:  # noqa: N802
    """Undo what stands for spaces and line breaks in byte-level pieces."""
    return piece.replace("Ġ", " ").replace("Ċ", "\n")


def test_training_is_reproducible_and_files_load(tmp_path):
    assert make().to_str() == make().to_str()
    save_tokenizer(TOKENIZER, tmp_path)
    assert load_tokenizer(tmp_path).get_vocab() == TOKENIZER.get_vocab()


def test_refusals(tmp_path):
    with pytest.raises(ValidationError, match="vocab_size=100: bytes and special tokens alone"):
        train_tokenizer(["a"], 100)
    with pytest.raises(ValidationError, match="there is no tokenizer.json"):
        load_tokenizer(tmp_path)


def test_functions_with_docstrings_become_conversations_turn_about():
    write, explain = examples(SOURCE)
    assert (
        write.question
        == "Write the Python function `push(self, item, *, front=False)`. Add an item."
    )
    assert write.answer.startswith('```python\ndef push(self, item, *, front=False):\n    """Add')
    assert write.answer.endswith("    self.items.append(item)\n```")
    assert explain == ("What does the Python function `pop` do?", "Take one away.")


def test_what_is_no_python_has_no_conversations():
    assert list(examples("def f(:")) == []


def test_conversations_are_what_the_chat_template_writes(tmp_path):
    from transformers import AutoTokenizer

    save_tokenizer(TOKENIZER, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    example = next(examples(SOURCE))
    messages = [
        {"role": "user", "content": example.question},
        {"role": "assistant", "content": example.answer},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == example.render()
    TOKENIZER.encode_special_tokens = False
    ours = TOKENIZER.encode(example.render(), add_special_tokens=False).ids
    assert tokenizer(example.render())["input_ids"] == ours
    assert ours.count(TOKENIZER.token_to_id("<|im_start|>")) == 2
