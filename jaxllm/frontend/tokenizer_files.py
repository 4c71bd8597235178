"""Checks the files of a tokenizer, before the library reads them and after it has failed.

Before: refuse files that the library would wait for, or read without end. After: find the defect
and its file, since the library's own message often names only the line of Python that failed.
"""

from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError, shown
from jaxllm.files import check_is_regular, read_bytes, read_json

# The files of the largest vocabularies have 33 MB.
_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_TEMPLATE_BYTES = 1 << 20

_SMALL_OBJECTS = (
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
)
_OTHERS = (
    "tokenizer*.json", "tokenizer.model", "*.tiktoken", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "vocab.json", "vocab.txt", "merges.txt", "processor_config.json",
    "preprocessor_config.json",
)  # fmt: skip
# A tokenizer is read from one of these.
_READ = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
_TEMPLATES = ("*.jinja", "additional_chat_templates/*.jinja")


class SmallFiles:
    """The contents of a directory's small JSON files, as far as it has them."""

    def __init__(self, directory: Path):
        """Read them, and check the other files that the library may open; raise CheckpointError."""
        for name in _OTHERS:
            for path in directory.glob(name):
                check_is_regular(path)
                if path.stat().st_size > _MAX_TOKENIZER_BYTES:
                    raise CheckpointError(
                        f"{path} is longer than {_MAX_TOKENIZER_BYTES} bytes, the most that it "
                        "may have"
                    )
        for name in _TEMPLATES:
            for path in directory.glob(name):
                _check_is_text(path)
        found = [directory / name for name in _SMALL_OBJECTS]
        self._objects = {path.name: read_json(path) for path in found if _is_there(path)}
        self._directory = directory
        self._check_types()

    def __getitem__(self, name: str) -> dict[str, Any]:
        """The object of a file; empty if there is no such file."""
        return self._objects.get(name, {})

    def _check_types(self) -> None:
        """Check the fields that the library does not check before a request uses them."""
        templates = "a string, or templates by name"
        for file, field, kinds, words in (
            ("tokenizer_config.json", "chat_template", str | list | dict | None, templates),
            ("tokenizer_config.json", "model_max_length", int | float | None, "a number"),
            ("tokenizer_config.json", "tokenizer_class", str | None, "a name"),
            ("tokenizer_config.json", "auto_map", dict | list | None, "an object"),
            ("chat_template.json", "chat_template", str | None, "a string"),
        ):
            value = self[file].get(field)
            if not isinstance(value, kinds):
                path = self._directory / file
                raise CheckpointError(f"{path}: {field}={shown(value)} must be {words}")


def refuse_unread(directory: Path) -> None:
    """Refuse a directory whose tokenizer is only in files of formats that are not read."""
    if any(_is_there(directory / name) for name in _READ):
        return
    if _is_there(directory / "tekken.json"):
        found, why = "tekken.json", "the format of mistral-common, which is not read"
    elif ranks := sorted([*directory.glob("*.tiktoken"), *directory.glob("tiktoken.model")]):
        found = ranks[0].name
        why = "which does not say how text is cut into words; code of the model does"
    else:
        return
    raise CheckpointError(
        f"{directory} has its tokenizer only in {found}, {why}; pass tokenizer=..., a directory or "
        "repository that has it as tokenizer.json (transformers saves it so), or "
        "skip_tokenizer_init=True and prompts as prompt_token_ids"
        + ("" if found == "tekken.json" else ", or trust_remote_code=True if you trust that code")
    )


def defect(directory: Path, reason: str) -> CheckpointError | None:
    """Return what is wrong in a directory whose tokenizer failed to load for this reason; None if
    the files do not show it."""
    path = directory / "tokenizer.json"
    if not _is_there(path):
        return None
    try:
        _check_tokenizer_json(path)
    except CheckpointError as error:
        return error
    others = [n for n in _SMALL_OBJECTS[1:4] if _is_there(directory / n)]
    if not others:
        return None
    files = " or ".join(str(directory / name) for name in others)
    return CheckpointError(f"{files} does not fit its tokenizer.json: {reason}")


def _check_tokenizer_json(path: Path) -> None:
    value = read_json(path, most=_MAX_TOKENIZER_BYTES)
    if not isinstance(value.get("model"), dict):
        raise CheckpointError(f"{path} describes no tokenizer: it has no object 'model'")
    added = value.get("added_tokens")
    if not isinstance(added, list):
        raise CheckpointError(f"{path} describes no tokenizer: it has no list 'added_tokens'")
    for token in added:
        if not isinstance(token, dict):
            raise CheckpointError(f"{path}: {shown(token)} in added_tokens must be an object")
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises nothing more special
        raise CheckpointError(f"{path} describes no tokenizer: {error}") from error


def _check_is_text(path: Path) -> None:
    try:
        read_bytes(path, most=_MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from error


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()
