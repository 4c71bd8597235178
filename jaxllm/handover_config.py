"""The options of engines that hand computed prompts over to each other."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxllm.errors import refused
from jaxllm.files import read_given_text
from jaxllm.option_types import option

Role = Literal["kv_producer", "kv_consumer", "kv_both"]

_LEAST_SECRET = 16  # characters


@dataclass(frozen=True, kw_only=True)
class HandOverConfig:
    """Hand-over of KV blocks"""

    kv_role: Role | None = option(
        None,
        "Whether the engine gives blocks of computed prompts to others ('kv_producer'), takes such "
        "blocks ('kv_consumer'), or does both ('kv_both'). Needs kv_offloading_size.",
    )
    kv_ip: str = option("127.0.0.1", "Address at which others reach an engine that gives blocks.")
    kv_port: int = option(
        0, "Port there, and that of the first of several replicas; 0 takes any that are free."
    )
    kv_secret_file: str | None = option(
        None,
        "File with the secret that engines share which hand blocks over; nobody without it gets "
        "any.",
    )
    kv_timeout: float = option(
        5.0, "Seconds without an answer after which a prompt is computed in place of taken over."
    )

    @property
    def gives(self) -> bool:
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def takes(self) -> bool:
        return self.kv_role in ("kv_consumer", "kv_both")

    def check(
        self,
        kv_offloading_size: float | None,
        num_replicas: int,
        nnodes: int | str,
        iteration_timeout: float,
    ) -> None:
        """Refuse what is wrong for every model."""
        if self.kv_role is None:
            if self.kv_secret_file is not None:
                why = "it is for engines with a kv_role"
                raise refused("kv_secret_file", self.kv_secret_file, why)
            return
        if kv_offloading_size is None:
            why = "blocks go through the host's memory; give kv_offloading_size, too"
            raise refused("kv_role", self.kv_role, why)
        if nnodes != 1:
            why = "each host has only its part of a block; leave kv_role out"
            raise refused("nnodes", nnodes, why)
        if self.kv_secret_file is None:
            why = "whoever may take blocks must know a secret; give kv_secret_file"
            raise refused("kv_role", self.kv_role, why)
        if not 0 <= self.kv_port <= 2**16 - num_replicas:
            why = "ports are 0 to 65535, and each replica has one"
            raise refused("kv_port", self.kv_port, why)
        if not self.kv_ip or self.kv_ip in ("0.0.0.0", "::", "*"):
            raise refused("kv_ip", self.kv_ip, "others are told it; give one of this host's own")
        if not (math.isfinite(self.kv_timeout) and self.kv_timeout > 0):
            raise refused("kv_timeout", self.kv_timeout, "give a number of seconds above 0")
        if 0 < iteration_timeout <= self.kv_timeout:
            why = f"an engine that waits for engine_iteration_timeout={iteration_timeout:g} is dead"
            raise refused("kv_timeout", self.kv_timeout, f"{why}; give less")
        self.read_secret()

    def read_secret(self) -> bytes:
        assert self.kv_secret_file is not None, "check() comes first"
        secret = read_given_text(self.kv_secret_file).strip()
        if len(secret) < _LEAST_SECRET:
            why = f"its secret has {len(secret)} characters; {_LEAST_SECRET} are the least"
            raise refused("kv_secret_file", self.kv_secret_file, why)
        return secret.encode()
