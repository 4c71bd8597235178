"""The tensors of GGUF files, as the loader reads those of a checkpoint: by its names, in its order,
box by box, out of mapped files.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from jaxllm.gguf.blocks import TABLES, TYPES, Codes, Decoded, values
from jaxllm.gguf.model import open_model
from jaxllm.gguf.names import Stored

_ELEMENTS_AT_ONCE = 1 << 21  # that are decoded in one piece


_HALVES = "float4_e2m1fn"  # codes that are multiples of a half


class Form(Protocol):
    """The form in which a matrix is held (`jaxllm_kernels.coded.CodeForm`)."""

    @property
    def codes(self) -> str: ...

    @property
    def group(self) -> int | None: ...


class TensorFacts(NamedTuple):
    """What the loader compares with the config."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class GGUFCheckpoint:
    """The tensors of a model. A context manager that owns the open files."""

    def __init__(self, file: Path):
        self._stored = open_model(file).stored()
        self.tensors = {name: _facts(its) for name, its in self._stored.items()}
        self._maps: dict[Path, mmap.mmap] = {}

    def __enter__(self) -> "GGUFCheckpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self._maps.clear()  # views that are still in use keep their mapping open

    def read(self, name: str) -> np.ndarray:
        """The values of a whole tensor, in float32."""
        shape = self.tensors[name].shape
        target = np.empty(shape, np.float32)
        self.copy(name, tuple(slice(0, size) for size in shape), target)
        return target

    def copy(
        self, name: str, box: tuple[slice, ...], target: np.ndarray, kind: Any = "float"
    ) -> None:
        """Fill the target with the values of a box of a tensor, piece by piece."""
        assert kind == "float", (name, kind)
        stored = self._stored[name]
        its = TYPES[stored.place.type]
        for rows, columns, blocks in self._blocks(stored, box):
            if its.codes is None:
                assert its.dtype is not None
                found = blocks.reshape(len(blocks), -1).view(its.dtype).astype(np.float32)
            else:
                assert its.decode is not None
                decoded = its.decode(blocks.reshape(-1, its.num_bytes))
                found = values(decoded, its.codes).reshape(len(blocks), -1)
            found = found[:, columns] - np.float32(stored.added)
            target[rows] = found if target.ndim > 1 else found[:, 0]
        self.release(name)

    def copy_part(
        self,
        name: str,
        box: tuple[slice, slice],
        target: np.ndarray,
        part: Literal["codes", "scales", "offsets"],
        form: Form,
    ) -> None:
        """Fill the target with the codes of a box of inputs, or with what their groups share."""
        stored = self._stored[name]
        kind = TYPES[stored.place.type]
        assert kind.decode is not None and kind.codes is not None, name
        for rows, inside, blocks in self._blocks(stored, box):
            decoded = kind.decode(blocks.reshape(-1, kind.num_bytes))
            if part == "codes":
                found = _in_kind(decoded.codes, kind.codes, form).reshape(len(blocks), -1)[
                    :, inside
                ]
            else:
                assert form.group is not None
                shared = _shared(decoded, kind.codes, part, form).reshape(len(blocks), -1)
                found = shared[:, inside.start // form.group : inside.stop // form.group]
            target[rows] = found
        self.release(name)

    def release(self, name: str) -> None:
        """Free the memory that reading from the tensor's file took."""
        mapping = self._maps.get(self._stored[name].place.file)
        if mapping is not None:
            mapping.madvise(mmap.MADV_DONTNEED)

    def _blocks(
        self, stored: Stored, box: tuple[slice, ...]
    ) -> Iterator[tuple[slice, slice, np.ndarray]]:
        """Yield pieces of a box: its rows, the columns within the piece, and the bytes of the
        blocks that contain them, [rows, blocks, bytes of a block]. A vector has rows of one."""
        place, kind = stored.place, TYPES[stored.place.type]
        mapping = self._mapped(place.file)
        data = np.frombuffer(mapping, np.uint8, place.num_bytes, place.offset)
        is_vector = len(stored.shape) == 1
        num_columns = 1 if is_vector else stored.shape[-1]
        if stored.expert is not None:
            data = data.reshape(place.shape[0], -1)[stored.expert]
        grid = data.reshape(-1, num_columns // kind.size, kind.num_bytes)
        rows, columns = box[0], slice(0, 1) if is_vector else box[-1]
        first, last = columns.start // kind.size, -(-columns.stop // kind.size)
        inside = slice(columns.start - first * kind.size, columns.stop - first * kind.size)
        step = max(1, _ELEMENTS_AT_ONCE // max(1, (last - first) * kind.size))
        for start in range(rows.start, rows.stop, step):
            end = min(start + step, rows.stop)
            index = _in_file(np.arange(start, end), stored.head_size)
            yield slice(start - rows.start, end - rows.start), inside, grid[index, first:last]

    def _mapped(self, file: Path) -> mmap.mmap:
        mapping = self._maps.get(file)
        if mapping is None:
            with file.open("rb") as opened:
                mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps[file] = mapping
        return mapping


def _in_kind(codes: np.ndarray, its: Codes, form: Form) -> np.ndarray:
    """Codes as those of a form: of 4 bits, or the whole numbers that they stand for. Those of e2m1
    are doubled."""
    if its.kind == form.codes:
        return codes
    table = TABLES[its.kind] * (2 if its.kind == _HALVES else 1)
    return table.astype(np.int8)[codes]


def _shared(
    decoded: Decoded, its: Codes, part: Literal["scales", "offsets"], form: Form
) -> np.ndarray:
    """Scales or offsets for the groups of a form, which may be smaller."""
    values = decoded.scales if part == "scales" else decoded.offsets
    if values is None:
        values = np.zeros_like(decoded.scales)
    if part == "scales" and its.kind == _HALVES and form.codes != _HALVES:
        values = values * np.float32(0.5)
    assert form.group is not None and its.group % form.group == 0, (its, form.group)
    return np.repeat(values, its.group // form.group, axis=1)


def _facts(stored: Stored) -> TensorFacts:
    place = stored.place
    share = place.shape[0] if stored.expert is not None else 1
    return TensorFacts(place.file, place.type_name, stored.shape, place.num_bytes // share)


def _in_file(rows: np.ndarray, head_size: int | None) -> np.ndarray:
    """Where rows are in the file. A head has its rotated pairs in halves, and in the file beside
    each other."""
    if head_size is None:
        return rows
    heads, in_head = np.divmod(rows, head_size)
    member, pair = np.divmod(in_head, head_size // 2)
    return heads * head_size + 2 * pair + member
