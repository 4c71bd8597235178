"""What a user names an adapter by, and what the engine knows of one. The names are vLLM's."""

import os
from dataclasses import dataclass

import msgspec

from jaxllm import bundled
from jaxllm.errors import refused


@dataclass(frozen=True, eq=False)
class LoRARequest:
    """An adapter: a directory as PEFT writes it. Two are equal if their names are."""

    lora_name: str
    lora_int_id: int  # at least 1
    lora_path: str  # or "bundled-tests", the adapter that comes with the package
    base_model_name: str | None = None
    load_inplace: bool = False  # files are always looked at again, so it changes nothing

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise refused("lora_name", self.lora_name, "it must be a non-empty string")
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 2**63:
            raise refused("lora_int_id", number, "it must be an integer of at least 1")
        if not isinstance(self.lora_path, str | os.PathLike) or not os.fspath(self.lora_path):
            raise refused("lora_path", self.lora_path, "it must be the path of a directory")
        shipped = bundled.adapter_path(os.fspath(self.lora_path))
        object.__setattr__(self, "lora_path", os.fspath(shipped or self.lora_path))

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


class Adapter(msgspec.Struct, frozen=True):
    """An adapter whose files a frontend has read and checked. Its content is what it is: another
    content under the same name is another adapter."""

    name: str
    number: int
    path: str
    content: str  # the hash of its files


class AdapterLimits(msgspec.Struct, frozen=True):
    """What adapters an engine takes."""

    max_loras: int  # in one step
    max_lora_rank: int
    dtype: str  # in which their values are kept
    # The linear layers that an adapter may change, by their names in a checkpoint: inputs, outputs.
    layers: dict[str, tuple[int, int]]
