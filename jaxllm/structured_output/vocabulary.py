"""The vocabulary of a model for the matchers of grammars: the bytes of each token.

It is made of the tokenizer.json, without transformers: an engine in a process of its own has
nothing else of the tokenizer. The frontend, which validates grammars, makes the same.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from jaxllm import bundled
from jaxllm.config import ModelConfig
from jaxllm.errors import JaxLLMError, ValidationError
from jaxllm.files import parse_json, read_bytes, read_json
from jaxllm.messages import EngineInfo

_FILE = "tokenizer.json"
_MAX_BYTES = 256 << 20  # the files of the largest vocabularies have 33 MB
# Bits of a word of a mask.
WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that a model can sample."""

    tokenizer: LLTokenizer
    size: int  # rows of the model's head; ids that the tokenizer lacks match nothing

    @property
    def num_words(self) -> int:
        return num_words(self.size)


def num_words(size: int) -> int:
    """The length of a mask of so many tokens: one bit for each, lowest first."""
    return -(-size // WORD_BITS)


def load_vocabulary(model: ModelConfig, info: EngineInfo) -> Vocabulary:
    """Load the vocabulary of an engine's model. Engines and frontends of one process share it.
    Raise ValidationError if the tokenizer has no tokenizer.json, or no bytes of tokens."""
    if model.skip_tokenizer_init:
        raise _refused("the engine has no tokenizer (skip_tokenizer_init=True)")
    file = _find(model, info.model_dir)
    return _load(file, info.vocab_size, tuple(sorted(info.eos_token_ids)))


@functools.lru_cache(maxsize=4)
def _load(file: Path, size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    try:
        settings = _settings(file.parent)
        text = read_bytes(file, most=_MAX_BYTES).decode("utf-8")
        whole = _completed(parse_json(text), settings, size)
        ends = {*eos_token_ids, *_named_end(whole, settings)}
        known = {token["id"] for token in whole["added_tokens"]}
        known.update(range(min(size, len(whole["model"]["vocab"]))))
        # Without any, llguidance looks for the usual names of an end of sequence.
        tokenizer = LLTokenizer(
            json.dumps(whole), n_vocab=size, eos_token=sorted(ends & known) or None
        )
    # The libraries raise nothing more special.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:300]
        raise _refused(f"{file} does not say which bytes each token has: {reason}") from error
    return Vocabulary(tokenizer, size)


def _find(model: ModelConfig, model_dir: str) -> Path:
    """The tokenizer.json of the tokenizer that the frontend loads."""
    source = model.tokenizer or (model.model if model.tokenizer_revision else model_dir)
    directory = Path(bundled.path(source) or source).expanduser()
    if directory.is_dir():
        file = directory / _FILE
        if not file.is_file():
            raise _refused(f"the tokenizer in {directory} has no {_FILE}")
        return file
    # The frontend has downloaded it from the hub.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    names = (_FILE, "tokenizer_config.json")
    try:
        file, _ = [
            Path(
                hf_hub_download(
                    source,
                    name,
                    revision=model.tokenizer_revision or model.revision,
                    cache_dir=model.download_dir,
                )
            )
            for name in names
        ]
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise _refused(f"the tokenizer {source!r} has no {_FILE}: {reason}") from error
    return file


def _settings(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer_config.json"
    return read_json(file) if file.is_file() else {}


def _completed(whole: dict[str, Any], settings: dict[str, Any], size: int) -> dict[str, Any]:
    """Return a tokenizer with the added tokens that only tokenizer_config.json has, and without
    those that the model cannot sample."""
    added = {token["id"]: token for token in whole.get("added_tokens") or ()}
    for key, token in (settings.get("added_tokens_decoder") or {}).items():
        token_id = int(key)
        added.setdefault(token_id, {"id": token_id} | {k: token.get(k, False) for k in _ADDED})
    kept = [added[token_id] for token_id in sorted(added) if token_id < size]
    return whole | {"added_tokens": kept, "truncation": None, "padding": None}


_ADDED = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def _named_end(whole: dict[str, Any], settings: dict[str, Any]) -> list[int]:
    """The id of the end of sequence that tokenizer_config.json names."""
    name = settings.get("eos_token")
    name = name.get("content") if isinstance(name, dict) else name
    return [token["id"] for token in whole["added_tokens"] if token["content"] == name]


def _refused(why: str) -> JaxLLMError:
    return ValidationError(
        f"structured_outputs is not possible with this engine: {why}",
        parameter="structured_outputs",
    )
