"""Tokenizers as families release them, with small vocabularies: each has its family's normalizer,
pre-tokenizer, decoder and special tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

_TEXTS = [
    "The quick brown fox jumps over the lazy dog, and they've counted 12345 of them.\n\n",
    "def read(path):\n    with open(path) as file:\n        return file.read()\n",
    "naïve café Straße 你好世界 こんにちは 12 345 6789  two   spaces\ttab\r\n",
]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Words as cl100k, Llama 3 and Qwen cut them; they differ in how many digits belong together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As tekken does: upper and lower case apart.
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Kind(NamedTuple):
    """A family's tokenizer, and how its directory names it."""

    make: Callable[[], Tokenizer]
    model_type: str
    tokenizer_class: str
    bos: str | None
    eos: str
    # What decoding makes of an encoded text, if not the same.
    normalize: str | None = None  # the form of Unicode
    adds_space: bool = False  # before the first word, and decoding leaves it there
    may_lose_a_space: bool = False  # the first one


def _byte_level(*steps: pre_tokenizers.PreTokenizer, special: list[str], **options) -> Tokenizer:
    """Of bytes, as GPT-2 began: cut by these steps, or else by GPT-2's own words."""
    tokenizer = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(
        add_prefix_space=options.pop("add_prefix_space", False), use_regex=not steps
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last]) if steps else last
    if form := options.pop("normalizer", None):
        tokenizer.normalizer = form
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS * 3, trainer)
    return tokenizer


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _pieces(*, prepends: bool, special: list[str]) -> Tokenizer:
    """SentencePiece's BPE with bytes for what no piece has, as Gemma and Llama 2 convert it."""
    pieces = [*special, *_BYTES]
    words = ["▁", *"abcdefghijklmnopqrstuvwxyzTS0123456789,.():\n'ïéß", "▁▁", "▁▁▁"]
    merges = [("▁", "▁"), ("▁", "▁▁")]
    for pair in ("t h", "th e", "▁ the", "a n", "an d", "▁ and", "i n", "r e", "▁ re", "e n"):
        left, right = pair.split()
        merges.append((left, right))
        words.append(left + right)
    vocab = {piece: index for index, piece in enumerate([*pieces, *dict.fromkeys(words)])}
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepends:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def _begins_with(tokenizer: Tokenizer, token: str) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token} $B",
        special_tokens=[(token, tokenizer.token_to_id(token))],
    )
    return tokenizer


def _gemma() -> Tokenizer:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    return _begins_with(_pieces(prepends=False, special=special), "<bos>")


def _llama2() -> Tokenizer:
    return _begins_with(_pieces(prepends=True, special=["<unk>", "<s>", "</s>"]), "<s>")


def _mistral() -> Tokenizer:
    tokenizer = _pieces(prepends=True, special=["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _begins_with(tokenizer, "<s>")


def _llama3() -> Tokenizer:
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokenizer = _byte_level(_split(_WORDS.format(digits="{1,3}")), special=special)
    return _begins_with(tokenizer, "<|begin_of_text|>")


def _qwen() -> Tokenizer:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = _split(_WORDS.format(digits=""))
    return _byte_level(words, special=special, normalizer=normalizers.NFC())


def _tekken() -> Tokenizer:
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    return _begins_with(_byte_level(_split(_CASED_WORDS), special=special), "<s>")


def _cohere() -> Tokenizer:
    special = ["<PAD>", "<UNK>", "<BOS_TOKEN>", "<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>"]
    tokenizer = _byte_level(special=special, normalizer=normalizers.NFC())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return _begins_with(tokenizer, "<BOS_TOKEN>")


def _gpt_neox() -> Tokenizer:
    special = ["<|endoftext|>", "<|padding|>"]
    tokenizer = _byte_level(special=special, normalizer=normalizers.NFC())
    # Runs of spaces, which are no special tokens.
    spaces = [AddedToken(" " * count, normalized=True) for count in range(24, 1, -1)]
    tokenizer.add_tokens(spaces)
    return tokenizer


KINDS = {
    "gemma": Kind(_gemma, "gemma2", "GemmaTokenizerFast", "<bos>", "<eos>"),
    "llama2": Kind(_llama2, "llama", "LlamaTokenizerFast", "<s>", "</s>", may_lose_a_space=True),
    "mistral": Kind(
        _mistral, "mistral", "LlamaTokenizerFast", "<s>", "</s>", may_lose_a_space=True
    ),
    "llama3": Kind(
        _llama3, "llama", "PreTrainedTokenizerFast", "<|begin_of_text|>", "<|end_of_text|>"
    ),
    "qwen": Kind(_qwen, "qwen2", "Qwen2TokenizerFast", None, "<|im_end|>", normalize="NFC"),
    "tekken": Kind(_tekken, "mistral", "PreTrainedTokenizerFast", "<s>", "</s>"),
    "cohere": Kind(
        _cohere, "cohere", "CohereTokenizerFast", "<BOS_TOKEN>", "<EOS_TOKEN>", normalize="NFC"
    ),
    "gpt_neox": Kind(
        _gpt_neox, "gpt_neox", "GPTNeoXTokenizerFast", None, "<|endoftext|>", normalize="NFC"
    ),
    "gpt2": Kind(
        lambda: _byte_level(special=["<|endoftext|>"]),
        "gpt2",
        "GPT2TokenizerFast",
        "<|endoftext|>",
        "<|endoftext|>",
    ),
    "gpt2-with-a-first-space": Kind(
        lambda: _byte_level(special=["<|endoftext|>"], add_prefix_space=True),
        "opt",
        "PreTrainedTokenizerFast",
        None,
        "<|endoftext|>",
        adds_space=True,
    ),
}


def write(kind: Kind, directory: Path) -> Tokenizer:
    """Write the tokenizer's files and a config.json; return the tokenizer."""
    tokenizer = kind.make()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": kind.tokenizer_class, "eos_token": kind.eos}
    if kind.bos:
        config["bos_token"] = kind.bos
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": kind.model_type}))
    return tokenizer
