"""The levels, modes and parts of an engine's sleep.

Level 0 only pauses. Level 1 moves the weights to the host's memory and drops the KV cache. Level 2
drops the weights too, and the engine reads them again when it wakes up. In mode 'keep' unfinished
requests wait, and after levels 1 and 2 compute their keys and values again; in mode 'abort' they
end. New requests wait in either mode.
"""

from collections.abc import Sequence

from jaxllm.errors import refused

WEIGHTS, KV_CACHE, SCHEDULING = "weights", "kv_cache", "scheduling"

_PARTS = {
    0: frozenset({SCHEDULING}),
    1: frozenset({WEIGHTS, KV_CACHE}),
    2: frozenset({WEIGHTS, KV_CACHE}),
}
_MODES = ("keep", "abort")
_TAGS = (WEIGHTS, KV_CACHE, SCHEDULING)


def parts_of(level: int, mode: str) -> frozenset[str]:
    """The parts that sleep at a level."""
    if isinstance(level, bool) or level not in _PARTS:
        raise refused(
            "level", level, "0 pauses, 1 moves weights to the host's memory, 2 drops them"
        )
    if mode not in _MODES:
        raise refused("mode", mode, f"use {' or '.join(map(repr, _MODES))}")
    return _PARTS[level]


def parts_named(tags: Sequence[str] | None) -> frozenset[str]:
    """The parts to wake up: the named ones, or all."""
    if isinstance(tags, str) or not isinstance(tags, Sequence | None):
        raise refused("tags", tags, "it must be a list, or None for all")
    for tag in tags or ():
        if tag not in _TAGS:
            raise refused("tags", tag, f"use {', '.join(map(repr, _TAGS))}, or leave it out")
    return frozenset(_TAGS if tags is None else tags)
