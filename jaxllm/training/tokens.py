"""Stores text as arrays of token ids, and makes the batch of every step.

A batch depends only on the seed and the number of the step. So a resumed run gets the same batches
as an uninterrupted one, without any stored position.
"""

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from jaxllm.errors import refused
from jaxllm.files import read_json
from jaxllm.training.chat_examples import examples
from jaxllm.training.corpus import Document
from jaxllm.training.tokenizer import EOS

_ENCODE_AT_ONCE = 64  # texts


@dataclass(frozen=True, kw_only=True)
class TokenData:
    """Token ids of all texts, concatenated. The end-of-text token ends each text."""

    train: np.ndarray  # uint16 [tokens]
    heldout: np.ndarray
    heldout_bytes: int  # size of the held-out text


def write_tokens(
    folder: Path, tokenizer: Tokenizer, documents: Sequence[Document], *, chat: bool
) -> None:
    """Tokenize a corpus into files; with `chat`, add conversations to the training texts."""
    if tokenizer.get_vocab_size() > 2**16:
        raise refused("tokenizer", tokenizer.get_vocab_size(), "at most 65536 tokens")
    folder.mkdir(parents=True, exist_ok=True)
    train = [d for d in documents if not d.is_heldout]
    heldout = [d for d in documents if d.is_heldout]
    # In files, a string like a special token is text. In conversations it is the special token.
    texts = encode(tokenizer, (d.text for d in train), special=False)
    conversations: Iterator[np.ndarray] = iter(())
    if chat:
        found = (e.render() for d in train if d.name.endswith(".py") for e in examples(d.text))
        conversations = encode(tokenizer, found, special=True)
    pieces = [*texts, *conversations]
    # Shuffle, because files of one folder are similar, and conversations come after the files.
    order = np.random.default_rng(0).permutation(len(pieces))
    _write(folder / "train.bin", [pieces[i] for i in order])
    _write(folder / "heldout.bin", encode(tokenizer, (d.text for d in heldout), special=False))
    with open(folder / "manifest.jsonl", "w", encoding="utf-8") as manifest:
        for document in documents:
            manifest.write(json.dumps(document.manifest_entry()) + "\n")
    # Write this file last: its existence means that all others are complete.
    facts = {"heldout_bytes": sum(d.num_bytes for d in heldout), "num_conversations": 0}
    facts["num_conversations"] = len(pieces) - len(train)
    (folder / "facts.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")


def has_tokens(folder: Path) -> bool:
    return (folder / "facts.json").is_file()


def read_tokens(folder: Path) -> TokenData:
    """Map the files of `write_tokens`."""
    train, heldout = (
        np.fromfile(folder / f"{name}.bin", np.uint16) for name in ("train", "heldout")
    )
    facts = read_json(folder / "facts.json")
    return TokenData(train=train, heldout=heldout, heldout_bytes=facts["heldout_bytes"])


class Batches:
    """Rows of the training tokens. An epoch has each row once, in a new order."""

    def __init__(self, tokens: np.ndarray, *, batch_size: int, context: int, seed: int):
        # A row has one token more than the context: the last target.
        self._num_rows = (len(tokens) - 1) // context
        if self._num_rows < batch_size:
            raise refused(
                "batch_size",
                batch_size,
                f"the data has {self._num_rows} rows of context={context} tokens; give more text "
                "or lower one of them",
            )
        self._tokens, self._batch_size, self._context = tokens, batch_size, context
        self._seed = seed

    def at(self, step: int) -> np.ndarray:
        """The batch of a step: int32 [B, context + 1]."""
        rows = [self._row(step * self._batch_size + i) for i in range(self._batch_size)]
        return np.stack(rows).astype(np.int32)

    def epoch(self, step: int) -> float:
        """The number of epochs before a step."""
        return step * self._batch_size / self._num_rows

    def _row(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, self._num_rows)
        start = _order(self._seed, epoch, self._num_rows)[place] * self._context
        return self._tokens[start : start + self._context + 1]


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_rows)


def heldout_rows(tokens: np.ndarray, context: int) -> np.ndarray:
    """All held-out tokens as rows [n, context + 1]; -1 pads the last row."""
    num_rows = max(1, -(-(len(tokens) - 1) // context))
    padded = np.full(num_rows * context + 1, -1, np.int32)
    padded[: len(tokens)] = tokens
    starts = np.arange(num_rows)[:, None] * context
    return padded[starts + np.arange(context + 1)]


def encode(tokenizer: Tokenizer, texts: Iterable[str], *, special: bool) -> Iterator[np.ndarray]:
    """Token ids of each text, followed by the end-of-text token."""
    end = tokenizer.token_to_id(EOS)
    tokenizer.encode_special_tokens = not special
    for some in _groups(texts, _ENCODE_AT_ONCE):
        for encoding in tokenizer.encode_batch(some, add_special_tokens=False):
            yield np.array([*encoding.ids, end], np.uint16)
    tokenizer.encode_special_tokens = False


def _groups(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    group: list[str] = []
    for text in texts:
        group.append(text)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _write(path: Path, arrays: Iterable[np.ndarray]) -> None:
    with open(path, "wb") as file:
        for array in arrays:
            file.write(array.tobytes())
