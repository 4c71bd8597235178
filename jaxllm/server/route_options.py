"""What is asked of the router."""

import math
from dataclasses import dataclass

from jaxllm.errors import ValidationError, refused
from jaxllm.option_types import option


@dataclass(frozen=True, kw_only=True)
class RouteOptions:
    """Router"""

    prefill: tuple[str, ...] = option(
        (), "URLs of servers that compute prompts (--kv-role kv_producer); at least one."
    )
    decode: tuple[str, ...] = option(
        (), "URLs of servers that answer (--kv-role kv_consumer); at least one."
    )
    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0 lets other machines in.")
    port: int = option(8080, "Port to listen at.")
    allowed_hosts: tuple[str, ...] = option(
        (), "Names by which the router may be called, as of `jaxllm serve`."
    )
    allowed_origins: tuple[str, ...] = option(
        (), "Web origins whose pages may send requests; '*' means all."
    )
    prefill_timeout: float = option(
        60.0, "Seconds that a prompt may take; then it is computed where it is answered."
    )
    max_body_bytes: int = option(64 << 20, "Longest body of a request.")

    def validate(self) -> None:
        for name in ("prefill", "decode"):
            if not getattr(self, name):
                raise ValidationError(f"{name} has no URL; give one at least", parameter=name)
        if not 0 <= self.port < 2**16:
            raise refused("port", self.port, "ports are 0 to 65535")
        if not (math.isfinite(self.prefill_timeout) and self.prefill_timeout > 0):
            why = "give a number of seconds above 0"
            raise refused("prefill_timeout", self.prefill_timeout, why)
        if self.max_body_bytes < 1:
            raise refused("max_body_bytes", self.max_body_bytes, "it must be at least 1")
