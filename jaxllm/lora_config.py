"""The options of adapters."""

from dataclasses import dataclass

from jaxllm.errors import refused
from jaxllm.option_types import option

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Adapters (LoRA)"""

    enable_lora: bool = option(False, "Serve adapters of the model, as PEFT writes them.")
    max_loras: int = option(1, "Most adapters in one step. Requests of others wait for a place.")
    max_lora_rank: int = option(
        16, f"Highest rank of an adapter: {', '.join(map(str, _RANKS))}. All take as much memory."
    )
    max_cpu_loras: int | None = option(
        None, "Adapters that are kept in the host's memory (default: max_loras)."
    )

    def check(self) -> None:
        """Refuse values that are wrong for every model."""
        if self.max_loras < 1:
            raise refused("max_loras", self.max_loras, "give at least 1")
        if self.max_lora_rank not in _RANKS:
            raise refused(
                "max_lora_rank", self.max_lora_rank, f"use one of {', '.join(map(str, _RANKS))}"
            )
        kept = self.max_cpu_loras
        if kept is not None and kept < self.max_loras:
            raise refused("max_cpu_loras", kept, f"it is below max_loras={self.max_loras}")

    @property
    def num_kept(self) -> int:
        """How many adapters the host keeps."""
        return self.max_cpu_loras or self.max_loras
