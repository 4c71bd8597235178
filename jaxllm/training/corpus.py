"""Reads files as text, and holds some of them out for evaluation.

Whether a file is held out depends only on its name below the given folder. So it does not depend on
the machine or on the order of files.
"""

import fnmatch
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxllm.errors import ValidationError, refused

SUFFIXES = (".py", ".rst", ".txt", ".md")


@dataclass(frozen=True, kw_only=True)
class Document:
    """A file of text."""

    name: str  # relative to the given folder, with that folder's own name before it
    text: str
    is_heldout: bool

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())

    def manifest_entry(self) -> dict[str, str | int]:
        """The document's entry in the model card's manifest."""
        return {
            "name": self.name,
            "bytes": self.num_bytes,
            "sha256": hashlib.sha256(self.text.encode()).hexdigest(),
            "split": "heldout" if self.is_heldout else "train",
        }


def read_corpus(
    sources: Sequence[str | Path], *, exclude: Sequence[str] = (), heldout_share: float
) -> list[Document]:
    """Read files and folders, sorted by name.

    Args:
      exclude: patterns (`test/*`, `*/tests/*`) of names below a folder that are skipped. Files
        that are empty or not UTF-8 are skipped, too.
      heldout_share: the share of files, not of bytes, that is held out.
    """
    if not 0 <= heldout_share < 1:
        raise refused("heldout_share", heldout_share, "it must be at least 0 and below 1")
    documents: dict[str, Document] = {}
    for source in map(Path, sources):
        for name, path in _files(source, exclude):
            text = _read(path)
            if not text:
                continue
            if name in documents:
                raise refused("data", str(source), f"{name} comes from two of the sources")
            is_heldout = _place(name) < heldout_share
            documents[name] = Document(name=name, text=text, is_heldout=is_heldout)
    if not documents:
        raise ValidationError(
            f"data has no text; give files or folders with {', '.join(SUFFIXES)}",
            parameter="data",
        )
    return [documents[name] for name in sorted(documents)]


def _files(source: Path, exclude: Sequence[str]) -> Iterator[tuple[str, Path]]:
    source = source.resolve()
    if source.is_file():
        yield source.name, source
        return
    if not source.is_dir():
        raise refused("data", str(source), "no such file or folder")
    for path in sorted(source.rglob("*")):
        below = path.relative_to(source).as_posix()
        if (
            path.suffix in SUFFIXES
            and path.is_file()
            and not any(fnmatch.fnmatch(below, pattern) for pattern in exclude)
        ):
            yield f"{source.name}/{below}", path


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def _place(name: str) -> float:
    """A number from 0 to 1 that depends on the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
