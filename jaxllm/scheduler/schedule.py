"""The one type between the host, which plans a step, and the device side, which runs it.

A Schedule is plain data: it can be sent to other hosts, and a runner needs nothing else. Rows are
the requests of this step; rows that compute a single token (decodes) come first.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxllm.sampling_params import SamplingParams

# In Schedule.token_ids: the token that this row's slot sampled last, which is only on the device.
CARRIED_TOKEN = -1
# In Schedule.starts: where the row of this slot before ended.
GO_ON = -1
# In StepResult.token_ids: the model's logits were no numbers, so there is nothing to choose from.
NO_TOKEN = -1

# What a feature adds to a step, or what a step brought for it: its arrays, by the names that it
# gives them. Plain data, since it travels between hosts.
Slice = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request takes a slot: what the device side must know about it while it runs."""

    slot: int
    sampling_params: SamplingParams
    seed: int
    # Tokens that min_tokens keeps from being sampled.
    stop_token_ids: list[int]
    bad_word_ids: list[list[int]]
    prompt_token_ids: list[int]
    # Not empty when a preempted request comes back.
    output_token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One step: which slots, how many tokens each, in which blocks."""

    step: int
    # Rows, one per request in this step; those that compute a single token come first.
    num_decodes: int
    slots: np.ndarray  # int32 [rows]
    num_tokens: np.ndarray  # int32 [rows]: tokens computed in this step, at least 1
    # Where the tokens of a row begin: a position in its sequence, if it has just been admitted;
    # else GO_ON, where those of the slot's last row end, which the device knows.
    starts: np.ndarray  # int32 [rows]
    context_lens: np.ndarray  # int32 [rows]: tokens in the KV cache after this step
    samples: np.ndarray  # bool [rows]: whether the row's last token is followed by a sampled one
    # The rows' tokens one after another; CARRIED_TOKEN where the host does not know the id yet.
    token_ids: np.ndarray  # int32 [sum(num_tokens)]
    # Changes of the device's block tables: (cache group, slot, index in the table, block).
    block_updates: np.ndarray  # int32 [changes, 4]
    admissions: list[Admission] = field(default_factory=list)
    wants_logprobs: bool = False  # some sampling row does
    # Some row wants more of them than a step computes (MAX_STEP_LOGPROBS), for its last token.
    wants_logits: bool = False
    slices: dict[str, Slice] = field(default_factory=dict)  # of features that some row uses
    needs_mixed: bool = False  # a slice of these does, see `decode_only`
    # The newest step that samples a CARRIED_TOKEN of this one, -1 if there is none; None: any of
    # those before may.
    carried_from: int | None = None

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def total_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def decode_only(self) -> bool:
        """Whether a program for decodes can run it."""
        return self.num_decodes == len(self.slots) and not self.needs_mixed


class LogprobArrays(NamedTuple):
    """Logprobs of some positions: column 0 is the token that is there, the others the best ones,
    best first."""

    token_ids: np.ndarray  # int32 [positions, 1 + k]
    logprobs: np.ndarray  # float32 [positions, 1 + k]
    ranks: np.ndarray  # int32 [positions], of column 0, 1-based
    normalisers: np.ndarray  # float32 [positions]: a logit less this is a logprob


class StepResult(NamedTuple):
    """What the device brought back for a Schedule, by row."""

    token_ids: np.ndarray  # int32 [>= rows]; meaningful where `samples` is set
    logprobs: LogprobArrays | None  # by row, if wants_logprobs
    # By row: all logits after its last token, if wants_logits.
    logits: np.ndarray | None = None  # float32 [>= rows, >= vocabulary]; padding is -inf
    slices: dict[str, Slice] = {}  # of the features in Schedule.slices; never changed
