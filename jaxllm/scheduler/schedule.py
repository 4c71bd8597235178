"""The one type between the host, which plans a step, and the device side, which runs it.

A Schedule is plain data: it can be sent to other hosts, and a runner needs nothing else. Each
request in a step is a row. Rows are in order of their number of tokens, so decodes, which compute a
single one, come first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from jaxllm.handover.source import BlockSource
from jaxllm.sampling_params import SamplingParams

# In Schedule.token_ids: the token that this row's slot sampled last. Only the device has it.
CARRIED_TOKEN = -1
# In Schedule.token_ids: what the drafter has proposed at this place. Only the device has it.
DRAFT_TOKEN = -2
# In Schedule.starts: the row begins where the slot's previous row ended.
GO_ON = -1
# In StepResult.token_ids: the logits were not finite, so no token was sampled.
NO_TOKEN = -1

# In Admission.adapter: the request has no adapter.
NO_ADAPTER = -1

# A feature's part of a Schedule or of a StepResult: its arrays by name. It is plain data, since it
# travels between hosts.
Slice = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What the device side must know about a request that takes a slot."""

    slot: int
    sampling_params: SamplingParams
    seed: int
    # The tokens that may not be sampled before min_tokens.
    stop_token_ids: list[int]
    bad_word_ids: list[list[int]]
    prompt_token_ids: list[int]  # NO_TOKEN where an embedding stands in place of a token
    # Not empty when a preempted request comes back.
    output_token_ids: list[int]
    adapter: int = NO_ADAPTER  # the slot of its adapter, while it runs


class AdapterWrite(NamedTuple):
    """An adapter that takes a slot of the device before the step runs."""

    slot: int
    content: str  # which adapter it is, among those that the executor has fetched


class StateCopies(NamedTuple):
    """Copies between the states of slots and snapshots of such states."""

    loads: np.ndarray  # int32 [n, 2]: before the step, from a snapshot to a slot
    stores: np.ndarray  # int32 [n, 2]: after the step, from a slot to a snapshot

    @classmethod
    def of(
        cls, loads: Sequence[tuple[int, int]], stores: Sequence[tuple[int, int]]
    ) -> "StateCopies":
        """Make the arrays of these pairs."""
        return cls(*(np.array(pairs, np.int32).reshape(len(pairs), 2) for pairs in (loads, stores)))


class Encoding(NamedTuple):
    """An image whose embeddings the tower puts into the pool of the device before the step."""

    rows: int  # of patches
    columns: int
    pixels: np.ndarray  # uint8: those of its patches
    pool_rows: np.ndarray  # int32 [tokens]: where in the pool they go


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMoves:
    """Blocks of the KV cache that move between the devices and the host before a step. The loads
    are read on the host before anything is written there, and written on the devices after the
    stores have been read there."""

    number: int  # counts the moves of an engine
    # int32 [stores, 3]: cache group, device block, place on the host. Behind the cache groups,
    # snapshots of states are a group.
    stores: np.ndarray
    contents: list[bytes]  # the hashes of what is stored
    loads: np.ndarray  # int32 [loads, 3]: the same numbers
    reads: list[tuple[int, int, bytes]]  # from files: cache group, place, content
    # From other engines: the same, and from which.
    takes: list[tuple[int, int, bytes, BlockSource]] = field(default_factory=list)


# What a block of KV is known by: its cache group, and the hash of its content.
BlockKey = tuple[int, bytes]


class Arrival(NamedTuple):
    """A content that is on the host now, or has failed to come."""

    number: int  # of the moves
    group: int
    content: bytes
    ok: bool
    is_of_others: bool = False  # it was to come from another engine


class Mover(Protocol):
    """What moves the blocks."""

    @property
    def num_given(self) -> int:
        """How many blocks other engines have got."""
        ...

    def send(self, moves: BlockMoves) -> None:
        """Dispatch moves, behind all steps that have been dispatched. Does not wait."""
        ...

    def arrived(self, *, wait: bool = False) -> Iterable[Arrival]:
        """Return what has come to the host since the last call; with `wait`, wait a moment for
        something that is on its way."""
        ...

    def is_stored(self, group: int, content: bytes) -> bool:
        """Whether there is a file of a content."""
        ...

    def forget(self, group: int, content: bytes) -> None:
        """Remove the file of a content, if there is one."""
        ...

    def forget_all(self) -> None:
        """Remove all files."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftReads:
    """What a draft model reads before a step, so that it can draft in the step. Rows are in order
    of their number of tokens."""

    slots: np.ndarray  # int32 [rows]
    num_tokens: np.ndarray  # int32 [rows], at least 1
    starts: np.ndarray  # int32 [rows]: the position of each row's first token
    token_ids: np.ndarray  # int32 [sum(num_tokens)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One step: which slots, how many tokens each, in which blocks."""

    step: int
    num_decodes: int  # the first rows, which compute a single token
    slots: np.ndarray  # int32 [rows]
    num_tokens: np.ndarray  # int32 [rows]: tokens computed in this step, at least 1
    # Where the tokens of a row begin: a position in the sequence for a request just admitted, else
    # GO_ON. The device knows where the slot's previous row ended.
    starts: np.ndarray  # int32 [rows]
    # int32 [rows]: tokens in the KV cache after this step, at most: drafts may have been refused
    context_lens: np.ndarray
    samples: np.ndarray  # bool [rows]: whether the row samples a token after its last one
    # The tokens of the rows, one row after another; CARRIED_TOKEN if the host has no id yet,
    # DRAFT_TOKEN for drafts.
    token_ids: np.ndarray  # int32 [sum(num_tokens)]
    # Changes of the device's block tables, in any order: (cache group, slot, index in the table,
    # block).
    block_updates: np.ndarray  # int32 [changes, 4]
    # int32 [rows]: how many of each row's tokens are drafts; None if no row has any.
    num_drafts: np.ndarray | None = None
    draft_reads: DraftReads | None = None
    moves: BlockMoves | None = None
    # int32 [rows]: the token behind each row that samples none, for a head that drafts; NO_TOKEN
    # for the other rows. None: no row has one, or nothing asks for it.
    next_tokens: np.ndarray | None = None
    state_copies: StateCopies | None = None
    admissions: list[Admission] = field(default_factory=list)
    adapter_writes: list[AdapterWrite] = field(default_factory=list)
    encodings: list[Encoding] = field(default_factory=list)
    wants_logprobs: bool = False  # whether a row that samples wants logprobs
    # Rows that sample late: under a mask that the host makes while the device runs the step. Their
    # tokens come from a second program, for which the executor waits (`Executor.sample`).
    late_rows: np.ndarray | None = None  # int32 [late rows], ascending
    # Whether a row wants more logprobs for its last token than a step computes (MAX_STEP_LOGPROBS).
    wants_logits: bool = False
    # Of the features that some row uses; empty if nothing of it is for the device.
    slices: dict[str, Slice] = field(default_factory=dict)
    needs_mixed: bool = False  # whether a slice needs a program for mixed steps
    # The newest step that samples a CARRIED_TOKEN of this step; -1 if there is no such step. None:
    # it may be any earlier step.
    carried_from: int | None = None

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def total_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def decode_only(self) -> bool:
        """Whether a program for decodes can run the step."""
        return self.num_decodes == len(self.slots) and not self.needs_mixed


class LateMasks(NamedTuple):
    """What the late rows of a step may sample, as bits: one for each token, lowest first."""

    first: np.ndarray  # int32 [late rows, words]: behind each row's newest token
    # int32 [late rows, n]: the drafts that each row may have, then NO_TOKEN; no others are
    # accepted. None: no late row has any.
    drafts: np.ndarray | None = None
    more: np.ndarray | None = None  # int32 [these drafts, words]: behind each of them


class LogprobArrays(NamedTuple):
    """Logprobs of some positions: column 0 is the token at the position, the others are the best
    tokens, best first."""

    token_ids: np.ndarray  # int32 [positions, 1 + k]
    logprobs: np.ndarray  # float32 [positions, 1 + k]
    ranks: np.ndarray  # int32 [positions]: the rank of column 0, from 1
    normalisers: np.ndarray  # float32 [positions]: a logprob is a logit minus this


class DraftedResult(NamedTuple):
    """What an engine that speculates adds to a result, by row."""

    num_proposed: np.ndarray  # int32 [>= rows]: tokens that the next step can have as drafts
    num_accepted: np.ndarray  # int32 [>= rows]: drafts of this step
    # int32 [>= rows, most drafts of a row]: the tokens after each row's first. As many of them are
    # sampled as drafts are accepted. Empty if no row has drafts.
    token_ids: np.ndarray
    logprobs: LogprobArrays | None  # of these tokens, one row after another, if wants_logprobs
    # int32 [>= rows, most drafts]: the tokens that the next step can have as drafts. Only of a step
    # with late rows, and of these.
    proposals: np.ndarray | None = None


class StepResult(NamedTuple):
    """What the device computed for a Schedule, by row."""

    # int32 [>= rows]; meaningful where `samples` is set. `drafted` has further ones.
    token_ids: np.ndarray
    logprobs: LogprobArrays | None  # by row, if wants_logprobs
    # By row: all logits after its last token, if wants_logits.
    logits: np.ndarray | None = None  # float32 [>= rows, >= vocabulary]; padding is -inf
    slices: dict[str, Slice] = {}  # of the features in Schedule.slices; read only
    drafted: DraftedResult | None = None  # only of an engine that speculates
    expert_tokens: np.ndarray | None = None  # int32 [L, E], by layer; only if they are counted
