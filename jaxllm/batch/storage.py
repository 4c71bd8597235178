"""Files on a local disk, or on any file system of fsspec (gs://, s3://, memory://)."""

import hashlib
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgspec

from jaxllm.batch.journal import sync_folder
from jaxllm.errors import JaxLLMError, ValidationError, refused
from jaxllm.logging import init_logger

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

logger = init_logger(__name__)

# A fingerprint hashes this many bytes of a file's head, and of its tail.
_SAMPLE_BYTES = 1 << 20

_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}


class Fingerprint(msgspec.Struct, frozen=True):
    """Enough data to recognise whether a file has changed."""

    size: int
    head: str
    tail: str


class Location:
    """A path or URL as the user gave it, and its file system."""

    def __init__(self, name: str):
        self.name = name
        self.fs, self.path = _resolve(name)

    def __str__(self) -> str:
        return self.name

    @property
    def is_local(self) -> bool:
        return "file" in _protocols(self.fs)

    @property
    def local_path(self) -> Path:
        assert self.is_local, self.name
        return Path(self.path)

    def is_same_as(self, other: "Location") -> bool:
        """Whether both refer to one file, also under different names."""
        if self.is_local and other.is_local:
            return os.path.realpath(self.path) == os.path.realpath(other.path)
        return (_protocols(self.fs), self.path) == (_protocols(other.fs), other.path)

    def exists(self) -> bool:
        return self.fs.exists(self.path)

    def size(self) -> int:
        """Size in bytes; 0 if unknown."""
        return self.fs.size(self.path) or 0

    def open(self) -> BinaryIO:
        """Open the file for reading from its beginning."""
        if self.is_local and self.local_path.exists() and not self.local_path.is_file():
            raise ValidationError(f"{self.name} is not a regular file; give one that can be reread")
        try:
            # Reads, and holds in memory, 8 MiB at a time.
            opened = self.fs.open(self.path, "rb", block_size=8 << 20)
        except FileNotFoundError:
            raise ValidationError(f"{self.name}: no such file; check the path") from None
        return cast(BinaryIO, opened)

    def fingerprint(self) -> Fingerprint:
        with self.open() as file:
            head = file.read(_SAMPLE_BYTES)
            size, tail = self.size(), b""
            if file.seekable():  # files over HTTP may not be
                file.seek(max(0, size - _SAMPLE_BYTES))
                tail = file.read(_SAMPLE_BYTES)
        return Fingerprint(size, hashlib.sha256(head).hexdigest(), hashlib.sha256(tail).hexdigest())

    def check_writable(self) -> None:
        """Raise if no file can be written there. Called before there are results to lose."""
        if self.is_local:
            folder = self.local_path.parent
            if not folder.is_dir():
                raise ValidationError(
                    f"{self.name}: there is no directory {folder}; make it, or give another path"
                )
            if self.local_path.exists() and not self.local_path.is_file():
                raise ValidationError(f"{self.name} is not a regular file; give another path")
            probe = str(folder / f".jaxllm-{uuid.uuid4().hex}")
        else:
            probe = f"{self.path}.jaxllm-{uuid.uuid4().hex}"
        try:
            self.fs.pipe_file(probe, b"")
        except Exception as error:  # every file system has its own errors
            raise JaxLLMError(
                f"{self.name} cannot be written: {_reason(error)}; check the path and the rights"
            ) from error
        try:
            self.fs.rm_file(probe)
        except Exception as error:
            logger.warning("%s was written to try and cannot be removed: %s", probe, error)

    def put(self, source: Path) -> None:
        """Write a local file there atomically. If the destination is local, move it; both must be
        on the same disk."""
        if self.is_local:
            with open(source, "rb") as file:
                os.fsync(file.fileno())
            os.replace(source, self.local_path)
            sync_folder(self.local_path.parent)
            return
        try:
            self.fs.put_file(str(source), self.path)
        except Exception as error:
            raise JaxLLMError(
                f"{self.name} cannot be written: {_reason(error)}. All results are in {source}; "
                "the same command uploads them"
            ) from error


def _resolve(name: str) -> tuple["AbstractFileSystem", str]:
    from fsspec.core import url_to_fs

    protocol = name.partition("://")[0] if "://" in name else "file"
    try:
        fs, path = url_to_fs(name)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        remedy = f"install jaxllm[{extra}]" if extra else str(error)
        raise ValidationError(
            f"{name}: {protocol}:// needs a package that is missing; {remedy}"
        ) from error
    except ValueError as error:
        raise refused("path", name, str(error)) from None
    return cast("AbstractFileSystem", fs), cast(str, path)


def _protocols(fs: "AbstractFileSystem") -> tuple[str, ...]:
    protocol: Any = fs.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
