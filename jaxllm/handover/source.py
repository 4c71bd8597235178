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

    gives: tuple[BlockSource, ...]  # each replica, as others reach it; empty: it gives none
    takes: bool

    def beside(self, other: "HandOver") -> "HandOver":
        """What this engine and another replica do as one."""
        return HandOver((*self.gives, *other.gives), self.takes)
