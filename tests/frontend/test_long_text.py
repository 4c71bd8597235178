"""Ends and least lengths of long texts, against those of the whole."""

import random

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from jaxllm.frontend import long_text
from jaxllm.frontend.long_text import Shape, TooLongToTell, TooManyTokens
from jaxllm.frontend.tokenizer import Tokenizer

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words, runs of spaces, scripts without spaces, added tokens, whole and in part.
PARTS = [
    *("hello", "world", "you", "He", "it's", "SURE'S", "a", "éclair", "e\u0301", "naïve", "12345"),
    *(
        "你好世界",
        "你们好。再见，",
        "ครับ",
        "привет",
        "한국어",
        "😀",
        "👩\u200d👩",
        "\u0338",
        "\u212b",
    ),
    *("<s>", "</s>", "<think>", "<thi", " ö<x> ", "ö<x>", "now then", "then", " mask", "▁", "_"),
    *(" ", " ", " ", " ", "  ", "      ", "\n", "\n\n ", "\t", "\r\n", "\u00a0", "\u3000", "\0"),
    *(".", ",", ", ", "...", "!", "'", "/", "-----", "&lt;", "\ufffd"),
]
ADDED = [
    AddedToken("now then", special=False),
    AddedToken("think", special=False, single_word=True, normalized=False),
    AddedToken("you", special=False, rstrip=True),
    AddedToken(" mask", special=False, lstrip=True),
    AddedToken("naïve", special=False, normalized=True),
]


def made(base, *, normalizer=None, splitter=None, added=(), bos=False):
    """A tokenizer with the vocabulary of another one."""
    rust = RustTokenizer.from_str(base.hf.backend_tokenizer.to_str())
    if normalizer is not None:
        rust.normalizer = normalizer
    if splitter is not None:
        rust.pre_tokenizer = splitter
    rust.add_tokens(list(added))
    if bos:
        rust.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust))


def split_by(pattern):
    steps = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(steps)


@pytest.fixture(scope="session")
def sentencepiece():
    """As Gemma has it: words carry their space, and nothing is put before a text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [*"helowrdyu", "▁h", "▁he", "ll", "▁hell", "▁hello", "▁w", "▁▁", "wo", "yo", "you"]
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o"), ("▁", "w")]
    merges += [("▁", "▁"), ("w", "o"), ("y", "o"), ("yo", "u")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    rust = RustTokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    rust.normalizer = normalizers.Replace(" ", "▁")
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust))


@pytest.fixture(scope="session")
def kinds(byte_level, byte_fallback, sentencepiece):
    first = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    of_pieces = made(sentencepiece)
    of_pieces.hf.backend_tokenizer.normalizer = None
    digits = [pre_tokenizers.Digits(individual_digits=True)]
    digits += [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    return {
        "gpt2": byte_level,
        "gpt2 added": made(byte_level, added=ADDED, bos=True),
        "llama3": made(byte_level, splitter=split_by(LLAMA_3), bos=True),
        "qwen": made(
            byte_level, normalizer=normalizers.NFC(), splitter=split_by(LLAMA_3), added=ADDED
        ),
        "gpt4o": made(byte_level, splitter=split_by(GPT_4O)),
        "starcoder": made(byte_level, splitter=pre_tokenizers.Sequence(digits)),
        "llama2": made(byte_fallback, added=ADDED, bos=True),
        "llama2 new": made(of_pieces, splitter=first),
        "gemma": made(sentencepiece, added=ADDED),
    }


KINDS = ["gpt2", "gpt2 added", "llama3", "qwen", "gpt4o", "starcoder", "llama2", "llama2 new"]
KINDS += ["gemma"]


@pytest.fixture
def small(monkeypatch):
    """Texts are long soon."""
    monkeypatch.setattr(long_text, "_SMALL_TEXT", 40)
    monkeypatch.setattr(long_text, "_CHARS_PER_TOKEN", 2)
    monkeypatch.setattr(long_text, "_PIECE", 50)
    monkeypatch.setattr(long_text, "_TOKENS_OF_CUT", 4)
    monkeypatch.setattr(long_text, "_MAX_CHARS_BEFORE_END", 1 << 20)


@pytest.fixture
def texts():
    rng = random.Random(5)
    return ["".join(rng.choices(PARTS, k=rng.choice([30, 60, 120]))) for _ in range(150)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", [True, False])
def test_the_end_of_a_text_is_that_of_the_whole(kind, special, kinds, texts, small):
    tokenizer, rng = kinds[kind], random.Random(6)
    read = []

    def encode(text, special):
        read.append(text)
        return tokenizer.encode(text, add_special_tokens=special)

    shape = Shape.of(tokenizer.hf)
    for text in texts:
        whole = tokenizer.encode(text, add_special_tokens=special)
        for num in (1, rng.randrange(2, 20), 40, len(whole), 10**4):
            ids = long_text.encode_end(encode, shape, text, num, 100, special)
            assert ids == whole[-num:], (text, num)
    assert len(set(read) - set(texts)) > 50  # ends


@pytest.mark.parametrize("kind", [*KINDS, "metaspace", "wordpiece", "python_bytes"])
def test_what_is_refused_is_too_long(kind, kinds, texts, small, request):
    tokenizer = kinds[kind] if kind in kinds else request.getfixturevalue(kind)
    shape, num_refused = Shape.of(tokenizer.hf), 0

    def encode(text, special):
        return tokenizer.encode(text, add_special_tokens=special)

    for text in texts:
        whole = encode(text, True)
        for most in (1, len(whole) // 8, len(whole) // 2, len(whole) - 1, len(whole), 10**4):
            try:
                ids = long_text.encode_at_most(encode, shape, text, most, True)
            except TooManyTokens as error:
                num_refused += 1
                assert most < error.at_least <= len(whole), text
            else:
                assert ids == whole
    assert num_refused > len(texts)


def test_every_token_of_a_byte_level_tokenizer_stands_for_so_many_bytes(kinds):
    lengths = {kind: Shape.of(kinds[kind].hf).longest_token_bytes for kind in KINDS}
    tokenizer = kinds["gpt2"]
    longest = max(len(tokenizer.detokenizer.token_bytes(id)) for id in range(len(tokenizer.hf)))
    assert lengths["gpt2"] == lengths["llama3"] == lengths["gpt4o"] == longest
    # It shortens, or takes spaces with it.
    assert lengths["qwen"] is lengths["gpt2 added"] is lengths["llama2"] is None


def test_of_a_tokenizer_that_is_not_understood_nothing_is_known(
    byte_level, metaspace, wordpiece, python_bytes
):
    strange = [
        metaspace,
        wordpiece,
        python_bytes,
        made(byte_level, splitter=split_by(r"\p{L}+ ?|\s+|.")),
        made(byte_level, splitter=split_by(r"(?<=a)\s+|\p{L}+")),
        made(byte_level, splitter=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        made(byte_level, normalizer=normalizers.Lowercase()),
    ]
    assert [Shape.of(one.hf) for one in strange] == [Shape()] * len(strange)


def test_a_vocabulary_with_spaces_within_tokens_has_no_borders(sentencepiece):
    rust = RustTokenizer.from_str(sentencepiece.hf.backend_tokenizer.to_str())
    pieces = rust.get_vocab() | {"o▁": rust.get_vocab_size()}
    rust.model = models.BPE(pieces, [("o", "▁")], unk_token="<unk>", byte_fallback=True)
    assert Shape.of(PreTrainedTokenizerFast(tokenizer_object=rust)) == Shape()


class Counted:
    """A tokenizer that counts what it is given."""

    def __init__(self, tokenizer):
        self.num_chars = 0
        self.shape = Shape.of(tokenizer.hf)
        self._tokenizer = tokenizer

    def __call__(self, text, special):
        self.num_chars += len(text)
        return self._tokenizer.encode(text, add_special_tokens=special)


MANY = 10_000_000


@pytest.mark.parametrize(
    ("kind", "most", "num_read"),
    [("gpt2", 1000, 0), ("gpt2", 30_000, 0), ("qwen", 1000, 1 << 16), ("llama2", 1000, 1 << 16)],
)
def test_ten_megabytes_are_hardly_read(kind, most, num_read, kinds):
    encode = Counted(kinds[kind])
    with pytest.raises(TooManyTokens) as caught:
        long_text.encode_at_most(encode, encode.shape, "hello " * (MANY // 6), most, True)
    assert encode.num_chars == num_read
    assert most < caught.value.at_least < MANY


def test_of_ten_megabytes_the_end_is_read(kinds):
    encode = Counted(kinds["qwen"])
    text = "hello, you. " * (MANY // 12)
    ids = long_text.encode_end(encode, encode.shape, text, 1000, 2000, True)
    assert ids == encode(text[-12_000:], True)[-1000:]
    assert encode.num_chars < 100_000


@pytest.mark.parametrize("text", ["a" * MANY, " " * MANY])
def test_an_end_that_cannot_be_told_is_refused_unread(text, kinds):
    encode = Counted(kinds["qwen"])
    with pytest.raises(TooLongToTell):
        long_text.encode_end(encode, encode.shape, text, 1000, 2000, True)
    assert encode.num_chars == 0
