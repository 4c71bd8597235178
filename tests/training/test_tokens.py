"""Batches by step, and the rows of the held-out text."""

import json
from collections import Counter

import numpy as np
import pytest

from jaxllm.errors import ValidationError
from jaxllm.training.corpus import Document
from jaxllm.training.tokenizer import EOS, START, train_tokenizer
from jaxllm.training.tokens import Batches, heldout_rows, read_tokens, write_tokens

TOKENS = np.arange(1000, dtype=np.uint16)


def batches(**options) -> Batches:
    return Batches(TOKENS, **{"batch_size": 3, "context": 10, "seed": 0} | options)


def test_every_row_comes_once_in_an_epoch_in_a_new_order_each_time():
    ours = batches()
    rows = [tuple(row) for step in range(66) for row in ours.at(step)]
    first, second = rows[:99], rows[99:198]
    assert Counter(first) == Counter(second) and len(set(first)) == 99
    assert first != second
    assert all(row == tuple(range(row[0], row[0] + 11)) for row in first)
    assert ours.epoch(33) == 1.0


def test_a_batch_depends_on_seed_and_step_alone():
    np.testing.assert_array_equal(batches().at(50), batches().at(50))
    assert not np.array_equal(batches().at(50), batches(seed=1).at(50))


def test_too_little_text_is_refused():
    with pytest.raises(ValidationError, match="the data has 9 rows of context=100 tokens"):
        batches(batch_size=10, context=100)


def test_heldout_rows_have_every_target_once():
    rows = heldout_rows(TOKENS[:25], 10)
    assert rows.shape == (3, 11)
    targets = rows[:, 1:]
    assert targets[targets >= 0].tolist() == list(range(1, 25))
    assert rows[2, 5:].tolist() == [-1] * 6


def test_written_tokens_are_the_text_and_special_tokens_only_where_meant(tmp_path):
    documents = [
        Document(name="a.py", text='def f():\n    """Go."""\n', is_heldout=False),
        Document(name="b.txt", text=f"{START} {EOS}", is_heldout=False),
        Document(name="c.txt", text="held öut", is_heldout=True),
    ]
    tokenizer = train_tokenizer([d.text for d in documents], 300)
    write_tokens(tmp_path, tokenizer, documents, chat=True)
    data = read_tokens(tmp_path)
    end, start = tokenizer.token_to_id(EOS), tokenizer.token_to_id(START)
    # Two texts and a conversation of two turns.
    assert (data.train == end).sum() == 3 and (data.train == start).sum() == 2
    whole = tokenizer.decode(data.train.tolist(), skip_special_tokens=False)
    assert all(d.text in whole for d in documents[:2])
    assert tokenizer.decode(data.heldout.tolist()) == "held öut"
    assert data.heldout_bytes == 9
    names = [json.loads(line)["name"] for line in open(tmp_path / "manifest.jsonl")]
    assert names == ["a.py", "b.txt", "c.txt"]
