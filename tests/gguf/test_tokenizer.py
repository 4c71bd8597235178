"""Tokenizers of metadata have the ids of the tokenizers that it was made of."""

import itertools
import json

import pytest
from tokenizers import Tokenizer as Rust

from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.frontend.tokenizer import load_tokenizer, render_chat
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.tokenizer import make_tokenizer
from jaxllm.weights.checkpoint import resolve_model_dir
from tests.gguf.files import write_pair

TEXTS = [
    "The engine keeps a queue of requests, doesn't it?  Two spaces.\n\nA line: 12345 + 6.78",
    "Grüße, 世界! \t emoji 🙂 naïve I'M HE'S don't",
    " leading", "", "def main():\n    return [x for x in range(10)]\n",
    "<|im_start|>user\nHello<|im_end|>\n",
]  # fmt: skip


def loaded(path):
    model = str(path)
    return load_tokenizer(ModelConfig(model=model), str(resolve_model_dir(model)))


def test_a_tokenizer_of_bytes_is_that_of_the_checkpoint(tmp_path):
    file, plain = write_pair(tmp_path, "llama")
    ours, expected = loaded(file), loaded(plain)
    for text in TEXTS:
        ids = expected.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == expected.decode(ids)
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.eos_token_id == expected.eos_token_id == 0
    messages = [{"role": "user", "content": "Hello"}]
    assert render_chat(ours, messages) == render_chat(expected, messages)


# As training gives them: no two are equal.
def score(word: str) -> float:
    return len(word) - 20 - 0.01 * WORDS.index(word)


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = ["\u2581", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "\u2581he",
         "\u2581hello", "wor", "or", "ld", "\u2581w", "\u2581world", "world", "lo"]  # fmt: skip


def sentence_piece(**more):
    """The metadata of a small vocabulary whose longer tokens have higher scores."""
    tokens = PIECES + WORDS
    scores = [0.0] * len(PIECES) + [score(word) for word in WORDS]
    types = [2, 3, 3] + [6] * 256 + [1] * len(WORDS)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | more


def by_scores(text: str) -> list[str]:
    """SentencePiece's BPE: of all neighbours that make a token, join those of the best token, the
    first of equals."""
    scores = {word: score(word) for word in WORDS}
    parts = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        joined = [(scores.get(a + b), -i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        known = [pair for pair in joined if pair[0] is not None]
        if not known:
            break
        place = -max(known)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [
        piece
        for part in parts
        for piece in ([part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()])
    ]


@pytest.mark.parametrize("text", ["hello world", "hell low", "world hello wor", "ol! é hello"])
def test_merges_follow_from_scores(text):
    made = make_tokenizer(Metadata("m", sentence_piece()), 512)
    rust = Rust.from_str(json.dumps(made.tokenizer))
    encoded = rust.encode(text)
    assert encoded.tokens == ["<s>", *by_scores(text)]
    assert rust.decode(encoded.ids) == text
    assert made.eos_token_ids == [2] and made.bos_token_id == 1


def test_a_space_may_be_left_out_in_front():
    made = make_tokenizer(
        Metadata("m", sentence_piece(**{"tokenizer.ggml.add_space_prefix": False})), 512
    )
    rust = Rust.from_str(json.dumps(made.tokenizer))
    assert rust.encode("hello world", add_special_tokens=False).tokens == ["hello", "\u2581world"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model='bert' is not supported"),
        ({"tokenizer.ggml.scores": [1.0]}, "tokens and 1 scores"),
        ({"tokenizer.ggml.token_type": [1]}, "tokens and 1 types"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id=9999 .* is no id"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "must be a list of texts"),
        ({"tokenizer.ggml.tokens": ["a"] * 600}, "600 tokens, and token_embd.weight 512 rows"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "new"}, "pre='new' is not supp"),
        ({"tokenizer.ggml.model": "gpt2"}, "pre=None is not supported"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
             "tokenizer.ggml.merges": ["a"]},
            "the merge 'a', which is no pair",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_or_unknown_is_refused_by_name(change, error):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=error):
        make_tokenizer(Metadata("m", sentence_piece(**change)), 512)
