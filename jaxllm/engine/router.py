"""Chooses the replica that serves a request: the one with the least work, less its cached tokens.

Work is counted in tokens: of the prompt, and of the answer at its longest. A replica that has seen
the head of a prompt need not compute it again, so these tokens are subtracted from its work. If it
still has more work than another replica, the other one gets the request.
"""

from collections import OrderedDict
from collections.abc import Iterator

from jaxllm.messages import EngineRequest

# Prompts are remembered in pieces of _PIECE tokens, at most _MAX_PIECES in all.
_PIECE = 64
_MAX_PIECES = 1 << 17


class Router:
    """Remembers the replica of each request. Costs O(prompt) per request and nothing per step."""

    def __init__(self, num_replicas: int) -> None:
        self._work = [0] * num_replicas  # tokens of unfinished requests
        self._served: dict[str, tuple[int, int]] = {}  # request id -> replica, tokens
        # Hash of a piece and all before it -> the replica that computed it last; oldest first.
        self._seen: OrderedDict[int, int] = OrderedDict()

    def choose(self, request: EngineRequest) -> int:
        """Choose a replica for a request, and add the request to its work."""
        leader = self._served.get(request.prefix_leader_id or "")
        pieces = list(_pieces(request))
        if leader is not None:
            # Samples of one prompt share its blocks, so they must be on one replica.
            replica = leader[0]
        else:
            spared = self._spared_tokens(pieces)
            replica = min(
                range(len(self._work)), key=lambda r: (self._work[r] - spared[r], self._work[r])
            )
        for piece in pieces:
            self._seen[piece] = replica
            self._seen.move_to_end(piece)
        while len(self._seen) > _MAX_PIECES:
            self._seen.popitem(last=False)
        tokens = len(request.prompt_token_ids) + request.max_tokens
        self._work[replica] += tokens
        self._served[request.request_id] = replica, tokens
        return replica

    def replica_of(self, request_id: str) -> int | None:
        """The replica that serves an unfinished request."""
        served = self._served.get(request_id)
        return None if served is None else served[0]

    def forget(self, request_id: str) -> None:
        """Subtract a request that has ended from its replica's work. Unknown ids are ignored."""
        served = self._served.pop(request_id, None)
        if served is not None:
            replica, tokens = served
            self._work[replica] -= tokens

    def _spared_tokens(self, pieces: list[int]) -> list[int]:
        """The length in tokens of the prompt's head that each replica has seen."""
        spared = [0] * len(self._work)
        for index, piece in enumerate(pieces):
            replica = self._seen.get(piece)
            if replica is None:
                break
            if spared[replica] == index * _PIECE:
                spared[replica] += _PIECE
        return spared


def _pieces(request: EngineRequest) -> Iterator[int]:
    """Yield a hash for each whole piece of a prompt, which covers all before it too."""
    tokens, piece = request.prompt_token_ids, hash(request.cache_salt)
    for end in range(_PIECE, len(tokens) + 1, _PIECE):
        piece = hash((piece, *tokens[end - _PIECE : end]))
        yield piece
