"""Makes tokenizer.json and tokenizer_config.json of a file's metadata.

There are two kinds: BPE over bytes ("gpt2"), whose words are cut by the rule that the key
`tokenizer.ggml.pre` names; and SentencePiece's BPE ("llama"), whose merges follow from scores.
"""

from typing import Any, NamedTuple

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.gguf.metadata import Metadata

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPACE = "\u2581"
_ENDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(end: str) -> str:
    """Words end where an upper-case letter follows a lower-case one."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{_UPPER}*{_LOWER}+{end}|{before}{_UPPER}+{_LOWER}*{end}"


class Words(NamedTuple):
    """How text is cut into words."""

    pattern: str | None = None  # None: as GPT-2 does
    cuts_digits: bool = False  # each digit is a word, before all else
    ignores_merges: bool = False  # a word that is a token is one, whatever the merges say
    normalizer: str | None = None


def _split(*alternatives: str, **more: Any) -> Words:
    return Words("|".join(alternatives), **more)


_LLAMA3 = _split(_ENDS, _LETTERS, r"\p{N}{1,3}", _SIGNS, _LINES, ignores_merges=True)
_QWEN2 = _split(_ENDS, _LETTERS, r"\p{N}", _SIGNS, _LINES, normalizer="NFC")
_WORDS = {
    "gpt-2": Words(),
    "smollm": Words(cuts_digits=True),
    "starcoder": Words(cuts_digits=True),
    "command-r": Words(cuts_digits=True, normalizer="NFC"),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _split(_cased(f"{_ENDS}?"), r"\p{N}{1,3}", _SIGNS_AND_SLASHES, _LINES),
    "tekken": _split(_cased(""), r"\p{N}", _SIGNS_AND_SLASHES, _LINES, ignores_merges=True),
}
# Where no key says so, these begin texts with their first token.
_BEGIN = ("llama-bpe", "llama3", "llama-v3", "tekken")


class TokenizerFiles(NamedTuple):
    """The contents of a tokenizer's files, and ids for those of the model."""

    tokenizer: dict[str, Any]
    config: dict[str, Any]
    bos_token_id: int | None
    eos_token_ids: list[int]
    pad_token_id: int | None


def make_tokenizer(metadata: Metadata, vocab_size: int) -> TokenizerFiles:
    """Make a tokenizer for a model with so many rows of embeddings."""
    tokens = metadata.texts("tokenizer.ggml.tokens")
    if not 0 < len(tokens) <= vocab_size:
        raise CheckpointError(
            f"the GGUF file has {len(tokens)} tokens, and token_embd.weight {vocab_size} rows"
        )
    kind = metadata.text("tokenizer.ggml.model")
    types = _types(metadata, len(tokens))
    bos, eos, eot, eom, pad = (
        _id(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens))
        for name in ("bos", "eos", "eot", "eom", "padding")
    )
    if kind == "gpt2":
        parts = _byte_level(metadata, tokens)
        begins = metadata.optional_text("tokenizer.ggml.pre") in _BEGIN
    elif kind == "llama":
        parts = _sentence_piece(metadata, tokens, types)
        begins = True
    else:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model={shown(kind)} is not supported in a GGUF file; supported are "
            "'gpt2' and 'llama'; pass tokenizer=..., or skip_tokenizer_init=True"
        )
    begins = metadata.flag("tokenizer.ggml.add_bos_token", begins)
    ends = metadata.flag("tokenizer.ggml.add_eos_token", False)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        **parts,
        "post_processor": _around(
            parts["post_processor"], tokens, bos if begins else None, eos if ends else None
        ),
    }
    named = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: tokens[index] for name, index in named.items() if index is not None},
    }
    if (template := metadata.optional_text("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return TokenizerFiles(
        tokenizer=tokenizer,
        config=config,
        bos_token_id=bos,
        eos_token_ids=list(dict.fromkeys(i for i in (eos, eot, eom) if i is not None)),
        pad_token_id=pad,
    )


def _types(metadata: Metadata, count: int) -> list[int]:
    if not metadata.has("tokenizer.ggml.token_type"):
        return [1] * count
    types = metadata.integers("tokenizer.ggml.token_type")
    if len(types) != count:
        raise CheckpointError(f"the GGUF file has {count} tokens and {len(types)} types of tokens")
    return types


def _id(metadata: Metadata, key: str, count: int) -> int | None:
    index = metadata.index(key)
    if index is not None and index >= count:
        raise CheckpointError(f"{key}={index} in the GGUF file is no id of its {count} tokens")
    return index


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": its != _USER_DEFINED,
        }
        for index, (token, its) in enumerate(zip(tokens, types, strict=True))
        if its in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _model(tokens: list[str], merges: list[list[str]], **more: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        # Of equal tokens the first.
        "vocab": {token: index for index, token in reversed(list(enumerate(tokens)))},
        "merges": merges,
        **more,
    }


def _byte_level(metadata: Metadata, tokens: list[str]) -> dict[str, Any]:
    name = metadata.optional_text("tokenizer.ggml.pre")
    if name not in _WORDS:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre={shown(name)} is not supported in a GGUF file: nothing here knows "
            f"how it cuts text into words; supported are {', '.join(_WORDS)}; pass tokenizer=..., "
            "or skip_tokenizer_init=True"
        )
    words = _WORDS[name]
    merges = []
    for merge in metadata.texts("tokenizer.ggml.merges"):
        first, _, second = merge.partition(" ")
        if not (first and second):
            raise CheckpointError(f"the GGUF file has the merge {shown(merge)}, which is no pair")
        merges.append([first, second])
    cuts: list[dict[str, Any]] = []
    if words.cuts_digits:
        cuts.append({"type": "Digits", "individual_digits": True})
    if words.pattern is not None:
        pattern = {"Regex": words.pattern}
        cuts.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    cuts.append({**byte_level, "use_regex": words.pattern is None})
    return {
        "normalizer": None if words.normalizer is None else {"type": words.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
        "post_processor": {**byte_level, "use_regex": False},
        "decoder": {**byte_level, "use_regex": False},
        "model": _model(tokens, merges, ignore_merges=words.ignores_merges),
    }


def _sentence_piece(metadata: Metadata, tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise CheckpointError(f"the GGUF file has {len(tokens)} tokens and {len(scores)} scores")
    unknown = _id(metadata, "tokenizer.ggml.unknown_token_id", len(tokens))
    if unknown is None:
        unknown = next((index for index, its in enumerate(types) if its == _UNKNOWN), None)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizers: list[dict[str, Any]] = [spaces]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if metadata.flag("tokenizer.ggml.add_space_prefix", True):
        normalizers = [{"type": "Prepend", "prepend": _SPACE}, spaces]
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(
            tokens,
            _merges(tokens, scores, types),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        ),
    }


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> list[list[str]]:
    """The pairs that make a token, those of the token with the highest score first."""
    ids = {
        token: index
        for index, (token, its) in enumerate(zip(tokens, types, strict=True))
        if its not in (_UNKNOWN, _CONTROL, _BYTE)
    }
    found = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            first, second = ids.get(token[:cut]), ids.get(token[cut:])
            if first is not None and second is not None:
                found.append((-scores[index], index, first, second))
    found.sort()
    return [[tokens[first], tokens[second]] for *_, first, second in found]


def _around(
    inner: dict[str, Any] | None, tokens: list[str], first: int | None, last: int | None
) -> dict[str, Any] | None:
    """The processor that puts tokens around a text."""
    if first is None and last is None:
        return inner

    def special(index: int | None) -> list[dict[str, Any]]:
        return [] if index is None else [{"SpecialToken": {"id": tokens[index], "type_id": 0}}]

    def text(name: str, type_id: int) -> list[dict[str, Any]]:
        return [*special(first), {"Sequence": {"id": name, "type_id": type_id}}, *special(last)]

    template = {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": {
            tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]}
            for index in (first, last)
            if index is not None
        },
    }
    if inner is None:
        return template
    return {"type": "Sequence", "processors": [inner, template]}
