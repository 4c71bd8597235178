"""The models that come with the package: what runs when no model is named.

    bundled         a small model of Python code and documentation
    bundled-draft   a smaller one that guesses what it will say, with the same tokenizer

Their folders, beside this file, are model directories like any other; each has its model card.
"""

from pathlib import Path

MODEL, DRAFT = "bundled", "bundled-draft"

_FOLDERS = {MODEL: "model", DRAFT: "draft"}


def path(name: str) -> Path | None:
    """The directory of a bundled model; None if the name is none of theirs."""
    folder = _FOLDERS.get(name)
    return None if folder is None else Path(__file__).parent / folder
