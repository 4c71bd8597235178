"""Checkpoints on disk: finds the directory, and reads safetensors by mmap, tensor by tensor.

Opening a checkpoint reads only the headers and checks that every file is complete. The data of a
tensor is read on access, and `release` frees its memory.
"""

import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol, Self

import ml_dtypes
import msgspec
import numpy as np

from jaxllm import bundled
from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.files import open_regular, read_json
from jaxllm.gguf.blocks import NAMES
from jaxllm.gguf.blocks import TYPES as BLOCK_TYPES
from jaxllm.gguf.checkpoint import GGUFCheckpoint, TensorFacts
from jaxllm.gguf.directory import linked_files, model_directory, only_file
from jaxllm.gguf.model import SUFFIX
from jaxllm.models.checkpoint_map import Kind
from jaxllm.plural import counted

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
}
_BLOCKS = tuple(NAMES[kind] for kind, its in BLOCK_TYPES.items() if its.codes is not None)
# The types of tensors of a kind, as `jaxllm.models.checkpoint_map` has it. Blocks of GGUF are read
# as what they stand for, unless they are asked for their codes.
TYPES: dict[Kind, tuple[str, ...]] = {
    "float": ("F32", "F16", "BF16", *_BLOCKS),
    "blocks": _BLOCKS,
    "int8": ("I8",),
    "float8_e4m3fn": ("F8_E4M3",),
    "int64": ("I64",),
    "scale": ("F32", "F16", "BF16", "F8_E8M0", "F8_E4M3"),
    "power": ("U8", "F8_E8M0"),
    "int32": ("I32",),
    "uint8": ("U8",),
}
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8,
    "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64,
}  # fmt: skip
_ELEMENTS_AT_ONCE = 1 << 22  # read or compared in one piece
_MAX_HEADER_BYTES = 100_000_000
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 100_000_000
_MAX_NAME_BYTES = 255
# Config and tokenizer. A tokenizer's code runs only with trust_remote_code.
_SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]


def resolve_model_dir(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """The local directory of a model: bundled, given, downloaded from the hub, or that of a GGUF
    file."""
    if (shipped := bundled.path(model)) is not None:
        return shipped
    local = Path(model).expanduser()
    if local.is_dir():
        file = only_file(local)
        return local if file is None else model_directory(file)
    if local.is_file():
        if local.suffix == SUFFIX:
            return model_directory(local)
        raise CheckpointError(
            f"model {model!r} is a file; give its directory, {str(local.parent)!r}, if that has a "
            "config.json"
        )
    if local.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise CheckpointError(
            f"model {model!r}: there is no such directory or GGUF file, and it is not the name of "
            "a model on the hub (organisation/name), nor 'bundled', the one that comes with jaxllm"
        )
    # Imported here, because most starts do not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=[*_SMALL_FILES, "*.safetensors"],
                # These are second copies of the weights, in other layouts.
                ignore_patterns=["original/*", "consolidated*", "*/*"],
            )
        )
        if (found / "modules.json").is_file():  # it names folders with parts of an embedder
            snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=["*_Pooling/config.json", "*_Dense/*.json", "*_Dense/*.safetensors"],
            )
        return found
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"model {model!r} is neither a local directory nor could it be fetched from the hub: "
            f"{reason}"
        ) from error


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """The place of a tensor in its file, and its dtype and shape."""

    file: Path
    dtype: str  # in safetensors' names
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    num_bytes: int


class OpenCheckpoint(Protocol):
    """The tensors of a model directory. A context manager that owns the open files."""

    @property
    def tensors(self) -> Mapping[str, "TensorInfo | TensorFacts"]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def read(self, name: str) -> np.ndarray:
        """A whole tensor."""
        ...

    def copy(
        self, name: str, box: tuple[slice, ...], target: np.ndarray, kind: Kind = "float"
    ) -> None:
        """Fill the target with a box of a tensor of a kind, piece by piece; release each piece."""
        ...

    def release(self, name: str) -> None:
        """Free the memory that reading from the tensor's file took."""
        ...


def open_checkpoint(model_dir: Path, folders: Sequence[str] = ()) -> OpenCheckpoint:
    """Open the weights of a model directory, in whichever form it has them, with those of folders
    in it, whose names are put before those of their tensors."""
    if files := linked_files(model_dir):
        return GGUFCheckpoint(files[0])
    checkpoint = Checkpoint(model_dir)
    for folder in folders:
        for name, info in _read_header(model_dir / folder / "model.safetensors").items():
            checkpoint.tensors[f"{folder}.{name}"] = info
    return checkpoint


class Checkpoint:
    """The tensors of safetensors files: all of a model, or the given ones of a directory."""

    def __init__(self, model_dir: Path, *, files: Sequence[Path] | None = None):
        self.tensors: dict[str, TensorInfo] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for file in _weight_files(model_dir) if files is None else files:
            for name, info in _read_header(file).items():
                if name in self.tensors:
                    raise CheckpointError(
                        f"tensor {name} is both in {self.tensors[name].file.name} and {file.name}"
                    )
                self.tensors[name] = info
        if files is None:
            _check_index(model_dir / _INDEX, self.tensors)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self._maps.clear()  # views that are still in use keep their mapping open

    def read(self, name: str) -> np.ndarray:
        """A tensor as a view of its file. A slice reads only its own elements."""
        info = self.tensors[name]
        if info.dtype not in _DTYPES:
            raise UnsupportedModelError(
                f"tensor {name} in {info.file.name} is stored as {info.dtype}; supported are "
                f"{', '.join(_DTYPES)}"
            )
        if not info.num_bytes:
            return np.empty(info.shape, _DTYPES[info.dtype])
        mapping = self._maps.get(info.file)
        if mapping is None:
            with open_regular(info.file) as opened:
                mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps[info.file] = mapping
        flat = np.frombuffer(mapping, _DTYPES[info.dtype], math.prod(info.shape), info.offset)
        return flat.reshape(info.shape)

    def copy(
        self, name: str, box: tuple[slice, ...], target: np.ndarray, kind: Kind = "float"
    ) -> None:
        """Fill the target with a box of a tensor, piece by piece; release each piece."""
        values = self.read(name)[box]
        if kind == "power":
            # Bytes may have the type of what they mean.
            values = values.view(_DTYPES["F8_E8M0"])
        if not values.ndim:
            target[...] = values
            return
        for rows in row_slices(values):
            target[rows] = values[rows]
            self.release(name)
        if target.dtype == _DTYPES["F8_E4M3"] and (target.view(np.uint8) & 0x7F == 0x7F).any():
            # Our products would take it for a number.
            raise CheckpointError(f"tensor {name} has codes of NaN")
        if kind in ("scale", "power") and np.isnan(target.astype(np.float32)).any():
            raise CheckpointError(f"tensor {name} has scales of NaN")

    def release(self, name: str) -> None:
        """Free the memory that reading from the tensor's file took."""
        mapping = self._maps.get(self.tensors[name].file)
        if mapping is not None:
            mapping.madvise(mmap.MADV_DONTNEED)


def row_slices(array: np.ndarray) -> Iterator[slice]:
    """The rows of an array, in pieces of a limited number of elements."""
    step = max(1, _ELEMENTS_AT_ONCE // max(1, math.prod(array.shape[1:])))
    return (slice(start, start + step) for start in range(0, len(array), step))


def some_of(names: list[str]) -> str:
    """The first few of many names, for an error message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _weight_files(model_dir: Path) -> list[Path]:
    if (model_dir / _INDEX).exists():
        files = [model_dir / name for name in sorted(set(_weight_map(model_dir / _INDEX).values()))]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise CheckpointError(
                f"{model_dir}: {len(missing)} of the {len(files)} files that {_INDEX} lists are "
                f"missing: {some_of(missing)}; download the model again"
            )
        return files
    if (model_dir / "model.safetensors").exists():
        return [model_dir / "model.safetensors"]
    files = sorted(f for f in model_dir.glob("*.safetensors") if "consolidated" not in f.name)
    if files:
        return files
    pickled = sorted(f.name for f in [*model_dir.glob("*.bin"), *model_dir.glob("*.pt")])
    if pickled:
        raise CheckpointError(
            f"{model_dir} has its weights in {some_of(pickled)}, a pickle, which can run any code "
            "when loaded; convert it to safetensors, for example with transformers: "
            "from_pretrained(...).save_pretrained(...)"
        )
    raise CheckpointError(
        f"{model_dir} has no *.safetensors files; "
        "use load_format='dummy' to run without the model's weights"
    )


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index, most=_MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    nameless = [tensor for tensor, file in weight_map.items() if not _is_file_name(file)]
    if nameless:
        raise CheckpointError(f"{index} names no file that has tensor {some_of(nameless)}")
    outside = [n for n in weight_map.values() if Path(n).name != n or n == ".."]
    if outside:
        raise CheckpointError(f"{index} refers to files outside its directory: {some_of(outside)}")
    return weight_map


def _is_file_name(value: object) -> bool:
    if not isinstance(value, str) or "\0" in value:
        return False
    return 0 < len(value.encode("utf-8", "surrogatepass")) <= _MAX_NAME_BYTES


def _check_index(index: Path, tensors: dict[str, TensorInfo]) -> None:
    if not index.exists():
        return
    wrong = [
        f"{name} in {file}"
        for name, file in _weight_map(index).items()
        if name not in tensors or tensors[name].file.name != file
    ]
    if wrong:
        raise CheckpointError(
            f"{index} lists {counted(len(wrong), 'tensor')} not where it says: {some_of(wrong)}"
        )


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """Read and check the header. A file has 8 bytes of length, JSON, then data without gaps."""
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{file} is truncated or not a safetensors file: it has {size} bytes, and says "
                f"that its header has {length}"
            )
        raw = opened.read(length)
    try:
        # Decode entry by entry, so that a malformed entry takes no more memory than its text.
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        tensors = {
            name: _tensor_info(file, name, entry, data_start=8 + length)
            for name, entry in header.items()
        }
    except RecursionError:
        raise CheckpointError(f"{file} has a damaged header: it is nested too deeply") from None
    except ValueError as error:  # the base class of msgspec's errors
        raise CheckpointError(f"{file} has a damaged header: {error}") from error
    wanted = max((info.offset + info.num_bytes for info in tensors.values()), default=8 + length)
    if size != wanted:
        problem = "is truncated" if size < wanted else "has bytes that belong to no tensor"
        raise CheckpointError(
            f"{file} {problem}: it has {size} bytes, and its header describes {wanted}; "
            "download the file again"
        )
    end = 8 + length
    for name, info in sorted(tensors.items(), key=lambda t: (t[1].offset, t[1].num_bytes)):
        if info.offset != end:
            raise CheckpointError(
                f"{file} has a damaged header: tensor {name} does not begin where the one before "
                "it ends; download the file again"
            )
        end += info.num_bytes
    return tensors


_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    """A tensor's entry in a header."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=32)]
    data_offsets: tuple[_Size, _Size]


def _tensor_info(file: Path, name: str, raw: msgspec.Raw, *, data_start: int) -> TensorInfo:
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except msgspec.DecodeError as error:
        raise ValueError(f"tensor {name:.80}: {error}") from error
    start, end = entry.data_offsets
    bits = _BITS.get(entry.dtype, 0) * math.prod(entry.shape)
    if entry.dtype not in _BITS or start > end or (end - start) * 8 != bits:
        raise ValueError(f"tensor {name:.80} contradicts itself: {repr(entry):.200}")
    return TensorInfo(
        file=file,
        dtype=entry.dtype,
        # One number is a row of one, as others write it.
        shape=entry.shape or (1,),
        offset=data_start + start,
        num_bytes=end - start,
    )
