"""The models that come with the package: what runs when no model is named.

    bundled         a small model of Python code and documentation
    bundled-draft   a smaller one that guesses what it will say, with the same tokenizer
    bundled-tests   an adapter with which the first writes unit tests

Their folders, beside this file, are as those of any other model and adapter; each has its card.
"""

from pathlib import Path

MODEL, DRAFT, ADAPTER = "bundled", "bundled-draft", "bundled-tests"

_FOLDERS = {MODEL: "model", DRAFT: "draft"}


def path(name: str) -> Path | None:
    """The directory of a bundled model; None if the name is none of theirs."""
    folder = _FOLDERS.get(name)
    return None if folder is None else Path(__file__).parent / folder


def adapter_path(name: str) -> Path | None:
    """The directory of the bundled adapter; None if the name is not its own."""
    return Path(__file__).parent / "adapter" if name == ADAPTER else None
