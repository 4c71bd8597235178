"""What a draft model has read of each request, and what it reads before a step.

In a step with drafts the draft model reads the two newest tokens of a row, and drafts on. It must
have read all tokens before them, or it drafts in vain. It has if the row before had drafts, too.
Otherwise it reads them first, in a program of its own: the prompt before a request's first drafts,
and later what other steps have computed meanwhile. So nobody waits for it to read a prompt before
the first token, and it reads nothing of requests that get no drafts.

What it has read of a prefix is in the prefix's blocks. So a request that finds the prefix finds its
keys and values, too. This module knows of each block which content the draft model has read there.
"""

import numpy as np

from jaxllm.scheduler.kv.manager import KVCacheManager
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.schedule import DraftReads


class Reader:
    """Plans what a draft model reads, for requests up to `max_model_len` tokens."""

    def __init__(
        self, kv: KVCacheManager, *, max_tokens: int, max_rows: int, max_model_len: int
    ) -> None:
        """It reads at most `max_tokens` tokens before a step."""
        self._kv = kv
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        # By block of the first cache group: the hash of the content that was read there.
        self._read: list[bytes | None] = [None] * kv.groups[0].num_blocks
        self._left = 0  # tokens that may still be read before the step that is planned
        self._rows: list[tuple[Request, int, int]] = []  # what is: tokens [start, end)
        self._now: set[bytes] = set()  # contents of blocks that are read before this step

    def begin(self) -> None:
        """Begin to plan a step."""
        self._left = self._max_tokens
        self._rows.clear()
        self._now.clear()

    def forget(self) -> None:
        """Note that the caches are lost."""
        self._read = [None] * len(self._read)

    def most_drafts(self, request: Request) -> int:
        """How many drafts the request may have by the length of its text."""
        return self._max_model_len - request.num_tokens + 1

    def is_ready(self, request: Request) -> bool:
        """Whether the draft model will have read what it must before the planned step, in which the
        request computes its newest token. Plans to read it, or a part of it."""
        if request.num_drafts:
            return True
        end = request.num_tokens - 2
        if request.num_uncertain or end > request.num_known_tokens:
            return False  # a step with drafts has not come back
        if not self._skip_read_blocks(request, end):
            return False
        start = request.num_draft_read
        if start >= end:
            return True
        end_now = min(end, start + self._left)
        if end_now <= start or len(self._rows) == self._max_rows:
            return False
        self._left -= end_now - start
        self._rows.append((request, start, end_now))
        self.note(request, end_now)
        size = self._kv.block_size
        self._now.update(request.block_hashes[start // size : -(-end_now // size)])
        return end_now == end

    def take(self) -> DraftReads | None:
        """What is read before the planned step; None: nothing."""
        if not self._rows:
            return None
        rows = sorted(self._rows, key=lambda row: row[2] - row[1])
        tokens = [request.known_tokens(start, end) for request, start, end in rows]
        return DraftReads(
            slots=np.array([request.slot for request, _, _ in rows], np.int32),
            num_tokens=np.array([len(its) for its in tokens], np.int32),
            starts=np.array([start for _, start, _ in rows], np.int32),
            token_ids=np.concatenate([np.array(its, np.int32) for its in tokens]),
        )

    def note(self, request: Request, num_read: int) -> None:
        """Note that so many of the request's tokens are read, all of which must be known."""
        size = self._kv.block_size
        first, end = request.num_draft_read // size, num_read // size
        request.num_draft_read = num_read
        if first >= end or request.hash_root is None:
            return
        self._kv.hash_blocks(request, end)
        contents = request.block_hashes[first:end]
        for block, content in zip(request.tables[0].blocks[first:end], contents, strict=True):
            self._read[block] = content

    def _skip_read_blocks(self, request: Request, end: int) -> bool:
        """Go past blocks in which the draft model has read this content already. Return False if
        the next one is read before the planned step, for another request: rows that are read
        together do not see each other's keys."""
        size, blocks = self._kv.block_size, request.tables[0].blocks
        index = request.num_draft_read // size
        while index < len(request.block_hashes) and (index + 1) * size <= end:
            content = request.block_hashes[index]
            if content in self._now:
                return False
            if self._read[blocks[index]] != content:
                break
            index += 1
            request.num_draft_read = index * size
        return True
