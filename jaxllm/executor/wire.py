"""The messages between the ranks of an engine: typed structs in msgpack, with arrays as raw bytes.
No pickle."""

from typing import Any

import msgspec
import numpy as np

from jaxllm.lora.request import Adapter
from jaxllm.lora.shelf import Fetched
from jaxllm.messages import EngineInfo
from jaxllm.scheduler.schedule import BlockMoves, LateMasks, Schedule, StepResult

# ---- from rank 0


class Fits(msgspec.Struct, frozen=True):
    """How much of a replica fits. Every rank must have as many of each: they are in the shapes of
    its programs, and rank 0 numbers them."""

    num_blocks: int  # of the first cache group
    num_snapshots: int | None  # of states; None: the model has no states

    def on_both(self, other: "Fits") -> "Fits":
        """What fits here and there."""
        counts = [its for its in (self.num_snapshots, other.num_snapshots) if its is not None]
        return Fits(min(self.num_blocks, other.num_blocks), min(counts, default=None))


class Build(msgspec.Struct, tag=True):
    """Load the model and compile."""

    fits: dict[int, Fits]  # by replica: on all its ranks


class Execute(msgspec.Struct, tag=True):
    """Run a step of a replica."""

    replica: int
    schedule: Schedule


class Sample(msgspec.Struct, tag=True):
    """Sample the late rows of the newest step of a replica."""

    replica: int
    masks: LateMasks


class Move(msgspec.Struct, tag=True):
    """Move blocks of a replica, without a step. Otherwise moves are in a Schedule."""

    replica: int
    moves: BlockMoves


class ForgetBlock(msgspec.Struct, tag=True):
    """Remove the file of a block."""

    replica: int
    group: int
    content: bytes


class ForgetBlocks(msgspec.Struct, tag=True):
    """Remove all files of blocks."""

    replica: int


class FetchAdapter(msgspec.Struct, tag=True):
    """Read an adapter, from the path that it has on every host."""

    replica: int
    adapter: Adapter


class ForgetAdapter(msgspec.Struct, tag=True):
    """Free the memory of an adapter."""

    replica: int
    content: str


class Stop(msgspec.Struct, tag=True):
    """End. A reason says that the engine has failed."""

    reason: str = ""


# ---- to rank 0


class Hello(msgspec.Struct, tag=True):
    """A rank is connected; `options` are those that it was started with."""

    rank: int
    options: dict[str, str]
    fits: dict[int, Fits]  # by replica: on this rank


class Ready(msgspec.Struct, tag=True):
    """The model is loaded and compiled."""

    rank: int
    infos: dict[int, EngineInfo]  # by replica
    # The blocks that have files on this rank, by replica: cache group, content.
    files: dict[int, list[tuple[int, bytes]]]


class Figures(msgspec.Struct):
    """The counters of a runner."""

    num_token_rows: int = 0
    pack_s: float = 0.0
    num_compiles_after_warmup: int = 0


class StepDone(msgspec.Struct, tag=True):
    """The result of a step of a replica that has no device on rank 0."""

    replica: int
    result: StepResult
    figures: Figures


class Arrived(msgspec.Struct, tag=True):
    """Moves have ended on a rank: their blocks have come to its host, but for those that failed."""

    rank: int
    replica: int
    number: int  # of the moves
    failed: list[tuple[int, bytes]]  # cache group, content


class FilesChanged(msgspec.Struct, tag=True):
    """Blocks have got files on a rank, or lost them."""

    rank: int
    replica: int
    gained: list[tuple[int, bytes]]  # cache group, content
    lost: list[tuple[int, bytes]]


class AdapterFetched(msgspec.Struct, tag=True):
    """An adapter has been read, or could not be."""

    rank: int
    replica: int
    fetched: Fetched


class Failed(msgspec.Struct, tag=True):
    """A rank cannot go on."""

    rank: int
    reason: str


FromLeader = (
    Build
    | Execute
    | Sample
    | Move
    | ForgetBlock
    | ForgetBlocks
    | FetchAdapter
    | ForgetAdapter
    | Stop
)
ToLeader = Hello | Ready | StepDone | Arrived | FilesChanged | AdapterFetched | Failed


def encode(message: FromLeader | ToLeader) -> bytes:
    return _encoder.encode(message)


def decode_from_leader(data: bytes) -> FromLeader:
    return _from_leader.decode(data)


def decode_to_leader(data: bytes) -> ToLeader:
    return _to_leader.decode(data)


def _array_to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(f"{type(value)} does not travel between ranks")


def _array_from_plain(kind: type, value: Any) -> Any:
    assert kind is np.ndarray, kind
    dtype, shape, data = value
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_array_to_plain)
_from_leader = msgspec.msgpack.Decoder(FromLeader, dec_hook=_array_from_plain)
_to_leader = msgspec.msgpack.Decoder(ToLeader, dec_hook=_array_from_plain)
