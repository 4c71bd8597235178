"""Several processes as one JAX: who takes part, and a first word from rank 0 to all."""

import socket

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxllm.config import ParallelConfig
from jaxllm.errors import JaxLLMError, refused

# Long enough for a host that still boots; a rank that is missing is named by JAX.
_JOIN_TIMEOUT_S = 300
_LONGEST_WORD = 1024  # bytes


def join_hosts(parallel: ParallelConfig) -> int:
    """Meet the other ranks and return one's own. Comes before anything else that JAX does."""
    # It takes SIGTERM away from the process; ends are orderly here without it.
    jax.config.update("jax_enable_preemption_service", False)
    if not jax.distributed.is_initialized():
        try:
            if parallel.nnodes == "auto":
                jax.distributed.initialize(initialization_timeout=_JOIN_TIMEOUT_S)
            else:
                jax.distributed.initialize(
                    f"{parallel.master_addr}:{parallel.master_port}",
                    num_processes=parallel.nnodes,
                    process_id=parallel.node_rank,
                    initialization_timeout=_JOIN_TIMEOUT_S,
                )
        except (RuntimeError, ValueError) as error:
            raise JaxLLMError(
                f"nnodes={parallel.nnodes}, node_rank={parallel.node_rank}: the ranks did not meet "
                f"at {parallel.master_addr}:{parallel.master_port}: {error}"
            ) from error
    if parallel.nnodes not in ("auto", jax.process_count()):
        raise refused("nnodes", parallel.nnodes, f"JAX was told of {jax.process_count()} processes")
    return jax.process_index()


def broadcast(word: bytes | None) -> bytes:
    """What rank 0 says, on every rank. It travels on the devices' own network."""
    buffer = np.zeros(_LONGEST_WORD, np.uint8)
    if word is not None:
        assert len(word) <= _LONGEST_WORD - 2, f"{len(word)} bytes"
        framed = len(word).to_bytes(2, "big") + word
        buffer[: len(framed)] = np.frombuffer(framed, np.uint8)
    heard = np.asarray(multihost_utils.broadcast_one_to_all(buffer)).tobytes()
    return heard[2 : 2 + int.from_bytes(heard[:2], "big")]


def own_address(parallel: ParallelConfig) -> str:
    """The address of this host that the others reach."""
    named = parallel.master_addr if parallel.nnodes != "auto" else None
    address = socket.gethostbyname(named) if named else "127.0.0.1"
    is_meant = named is not None and (named == "localhost" or named.startswith("127."))
    if is_meant or not address.startswith("127."):
        return address
    # It is not known, or a host's own name leads back to itself. Nothing is sent: this only asks
    # which of the host's addresses leads outside.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
        except OSError:
            return address
        return probe.getsockname()[0]
