"""Typed access to a file's metadata.

Every key of an architecture is read, or known to change nothing. Others are refused by name, since
they may mean a computation that is not ours.
"""

from typing import Any, TypeVar

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown

T = TypeVar("T")

# What other keys say, or what is only about the making of the file.
_HARMLESS = {"vocab_size", "rope.scaling.finetuned"}


class Metadata:
    """The metadata of a model."""

    def __init__(self, path: object, values: dict[str, Any]):
        self._path = path
        self._values = values
        self._read: set[str] = set()
        self.architecture = self.text("general.architecture")

    def text(self, key: str) -> str:
        return self._of_type(key, self._needed(key), str, "a text")

    def optional_text(self, key: str) -> str | None:
        value = self._values.get(key)
        return None if value is None else self._of_type(key, value, str, "a text")

    def flag(self, key: str, default: bool) -> bool:
        return self._of_type(key, self._values.get(key, default), bool, "true or false")

    def index(self, key: str) -> int | None:
        """A token's id."""
        value = self._values.get(key)
        if value is None:
            return None
        return self._in_range(key, self._of_type(key, value, int, "a whole number"), 0)

    def texts(self, key: str) -> list[str]:
        return self._list(key, str, "texts")

    def integers(self, key: str) -> list[int]:
        return self._list(key, int, "whole numbers")

    def numbers(self, key: str) -> list[float]:
        return self._list(key, float, "numbers")

    def has(self, key: str) -> bool:
        return key in self._values

    def size(self, name: str) -> int:
        """A size of the architecture, at least 1."""
        found = self.optional_size(name)
        if found is None:
            raise CheckpointError(f"{self._path} lacks {self.architecture}.{name}")
        return found

    def optional_size(self, name: str) -> int | None:
        key, value = self._own(name)
        if isinstance(value, list):  # of each layer
            if len(set(value)) != 1:
                raise UnsupportedModelError(
                    f"{self._path}: {key} differs between layers, which is not supported"
                )
            value = value[0]
        if value is None:
            return None
        return self._in_range(key, self._of_type(key, value, int, "a whole number"), 1)

    def number(self, name: str) -> float | None:
        """A number of the architecture; None: there is none."""
        key, value = self._own(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not abs(value) < 1e30:
            raise CheckpointError(f"{self._path}: {key}={shown(value)} must be a number")
        return float(value)

    def word(self, name: str) -> str | None:
        key, value = self._own(name)
        return None if value is None else self._of_type(key, value, str, "a text")

    def own_flag(self, name: str) -> bool | None:
        key, value = self._own(name)
        return None if value is None else self._of_type(key, value, bool, "true or false")

    def refuse_unread(self) -> None:
        """Refuse keys of the architecture that nobody has read."""
        prefix = f"{self.architecture}."
        names = {key.removeprefix(prefix) for key in self._values if key.startswith(prefix)}
        unknown = sorted(names - self._read - _HARMLESS)
        if unknown:
            key = prefix + unknown[0]
            raise UnsupportedModelError(
                f"{self._path}: {key:.200}={shown(self._values[key])} is not supported: nothing "
                "here knows the key"
            )

    def _own(self, name: str) -> tuple[str, Any]:
        self._read.add(name)
        key = f"{self.architecture}.{name}"
        return key, self._values.get(key)

    def _needed(self, key: str) -> Any:
        if key not in self._values:
            raise CheckpointError(f"{self._path} lacks {key}")
        return self._values[key]

    def _of_type(self, key: str, value: Any, kind: type[T], words: str) -> T:
        if type(value) is not kind:
            raise CheckpointError(f"{self._path}: {key}={shown(value)} must be {words}")
        return value

    def _in_range(self, key: str, value: int, least: int) -> int:
        if not least <= value < 1 << 31:
            raise CheckpointError(
                f"{self._path}: {key}={value} must be from {least} to {(1 << 31) - 1}"
            )
        return value

    def _list(self, key: str, kind: type[T], words: str) -> list[T]:
        values = self._needed(key)
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            raise CheckpointError(f"{self._path}: {key} must be a list of {words}")
        return values
