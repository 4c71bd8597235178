"""A model in one GGUF file, or split into several: their metadata and tensors as a whole."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.gguf.blocks import TYPES, values
from jaxllm.gguf.config import Described, describe
from jaxllm.gguf.file import TensorPlace, read_header
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.names import Stored, stored_tensors

SUFFIX = ".gguf"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 1000


@dataclass(frozen=True, kw_only=True)
class GGUFModel:
    """What the files of a model say before their data."""

    files: tuple[Path, ...]
    values: dict[str, Any]  # the metadata of the first file
    tensors: dict[str, TensorPlace]

    @property
    def metadata(self) -> Metadata:
        return Metadata(self.files[0], self.values)

    def described(self) -> Described:
        """The model's config, and the names of its tensors."""
        return describe(self.metadata, self.tensors, self._read_small)

    def stored(self) -> dict[str, Stored]:
        """The tensors by the names that they have in a checkpoint."""
        described = self.described()
        return stored_tensors(self.tensors, described.naming, described.head_size)

    def _read_small(self, name: str) -> np.ndarray:
        """A small tensor, as float32."""
        place = self.tensors[name]
        with place.file.open("rb") as opened:
            opened.seek(place.offset)
            data = np.frombuffer(opened.read(place.num_bytes), np.uint8)
        return floats_of(data, place).reshape(place.shape)


def floats_of(data: np.ndarray, place: TensorPlace) -> np.ndarray:
    """The values of some bytes [n] of a tensor, as float32 [m]."""
    kind = TYPES[place.type]
    if kind.dtype is not None:
        return data.view(kind.dtype).astype(np.float32)
    assert kind.decode is not None and kind.codes is not None, kind
    return values(kind.decode(data.reshape(-1, kind.num_bytes)), kind.codes).reshape(-1)


def parts_of(path: Path) -> tuple[Path, ...]:
    """All files of the model that a file belongs to, in order. All are there."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    stem, _, count = match.groups()
    if not 1 <= int(count) <= _MAX_PARTS:
        raise CheckpointError(f"{path} is one of {int(count)} files; 1 to {_MAX_PARTS} can be read")
    files = tuple(
        path.with_name(f"{stem}-{index:05}-of-{count}{SUFFIX}")
        for index in range(1, int(count) + 1)
    )
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise CheckpointError(
            f"{path} is one of {len(files)} files of a model, and {len(missing)} of them are "
            f"missing: {', '.join(missing[:3])}"
        )
    return files


def open_model(path: Path) -> GGUFModel:
    """Read the headers of all files of a model."""
    files = parts_of(path)
    headers = [read_header(file) for file in files]
    tensors: dict[str, TensorPlace] = {}
    for index, header in enumerate(headers):
        number, count = (header.metadata.get(f"split.{its}") for its in ("no", "count"))
        if len(files) > 1 and (number, count) != (index, len(files)):
            raise CheckpointError(
                f"{header.path} says that it is file {number} of {count}, where 0 is the first; "
                f"its name says {index} of {len(files)}"
            )
        if len(files) == 1 and count not in (None, 0, 1):
            raise CheckpointError(
                f"{header.path} is one of {count} files of a model; give it the name that it was "
                "written with, name-00001-of-0000N.gguf, beside the others"
            )
        for name, place in header.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name:.200} is both in {tensors[name].file.name} and {place.file.name}"
                )
            tensors[name] = place
    promised = headers[0].metadata.get("split.tensors.count")
    if len(files) > 1 and promised not in (None, len(tensors)):
        raise CheckpointError(
            f"{files[0]} says that the model has {promised} tensors, and its files have "
            f"{len(tensors)}"
        )
    return GGUFModel(files=files, values=headers[0].metadata, tensors=tensors)
