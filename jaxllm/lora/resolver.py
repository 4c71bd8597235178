"""What a user writes to find adapters by their names: the interface and its name are vLLM's."""

from abc import ABC, abstractmethod

from jaxllm.lora.request import LoRARequest


class LoRAResolver(ABC):
    """Finds the files of an adapter that requests name and that the server does not know."""

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return where the adapter's files are, once they are there; None: there is no such one.

        It runs in the server's event loop, so what takes long is awaited, or runs in a thread. A
        name comes from a client and may be any text.

        Args:
          base_model_name: what requests call the model that the adapter belongs to.
          lora_name: what a request calls the adapter.
        """
