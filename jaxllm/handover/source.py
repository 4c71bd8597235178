"""Where blocks of a prompt may be had: what crosses processes of it."""

import msgspec


class BlockSource(msgspec.Struct, frozen=True):
    """An engine that gives blocks."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class HandOver(msgspec.Struct, frozen=True):
    """What an engine does of it."""

    gives: BlockSource | None  # as others reach it
    takes: bool
