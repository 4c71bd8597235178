"""How long an engine may take to end, for the engine and for all who wait for it.

At its end an engine finishes the step under way, writes the files of KV blocks that have none yet,
frees its devices and sends its last messages. Its replicas and its ranks do so at the same time.
Whoever waits for the engine's process waits longer, and so kills only a process that hangs.
"""

from jaxllm.config import EngineConfig

# The most seconds that writing files of KV blocks takes.
WRITING_S = 20.0
# The most seconds that a step, the devices and the last messages take.
_REST_S = 10.0
_LONGER_S = 5.0


def longest_end_s(config: EngineConfig) -> float:
    """How long the engine of a config may take to end."""
    return _REST_S + (0.0 if config.cache.kv_offloading_path is None else WRITING_S)


def patience_s(config: EngineConfig) -> float:
    """How long to wait for the end of its process before killing it."""
    return longest_end_s(config) + _LONGER_S
