"""Several processes in one JAX cluster: joining it, and a broadcast from rank 0 at start."""

import socket

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxllm.config import ParallelConfig
from jaxllm.errors import JaxLLMError, refused

# Long enough for a host that still boots. JAX's error names the missing ranks.
_JOIN_TIMEOUT_S = 300
_LONGEST_WORD = 1024  # bytes


def join_hosts(parallel: ParallelConfig) -> int:
    """Join the other ranks and return the own rank. Must run before any other use of JAX."""
    # The service takes over SIGTERM. This process shuts down in order without it.
    jax.config.update("jax_enable_preemption_service", False)
    if not jax.distributed.is_initialized():
        wanted = None if parallel.nnodes == "auto" else parallel.node_rank
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
        if wanted not in (None, jax.process_index()):
            # The devices are ordered by JAX's numbers, and the first of them must lead.
            raise refused("node_rank", wanted, f"JAX numbers this process {jax.process_index()}")
    if parallel.nnodes not in ("auto", jax.process_count()):
        raise refused("nnodes", parallel.nnodes, f"JAX was told of {jax.process_count()} processes")
    return jax.process_index()


def broadcast(word: bytes | None) -> bytes:
    """Return rank 0's bytes on every rank, over the network of the devices."""
    buffer = np.zeros(_LONGEST_WORD, np.uint8)
    if word is not None:
        assert len(word) <= _LONGEST_WORD - 2, f"{len(word)} bytes"
        framed = len(word).to_bytes(2, "big") + word
        buffer[: len(framed)] = np.frombuffer(framed, np.uint8)
    heard = np.asarray(multihost_utils.broadcast_one_to_all(buffer)).tobytes()
    return heard[2 : 2 + int.from_bytes(heard[:2], "big")]


def own_address(parallel: ParallelConfig) -> str:
    """An address of this host that the other hosts can reach."""
    named = parallel.master_addr if parallel.nnodes != "auto" else None
    address = socket.gethostbyname(named) if named else "127.0.0.1"
    is_meant = named is not None and (named == "localhost" or named.startswith("127."))
    if is_meant or not address.startswith("127."):
        return address
    # The address is unknown, or the host's own name resolves to loopback. Connecting a UDP socket
    # sends nothing; it only selects the address that routes outside.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
        except OSError:
            return address
        return probe.getsockname()[0]
