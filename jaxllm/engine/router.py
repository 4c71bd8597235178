"""Which replica serves a request: the one with least to do, counting what its cache may spare it.

Work is counted in tokens: those of the prompt, and those of the answer at its longest. A replica
that has seen the head of a prompt need not compute it again, so that much is taken off; when it has
more to do than another by more than that, the other one gets the request.
"""

from collections import OrderedDict
from collections.abc import Iterator

from jaxllm.messages import EngineRequest

# Prompts are remembered in pieces of so many tokens, and so many pieces in all.
_PIECE = 64
_MAX_PIECES = 1 << 17


class Router:
    """Remembers who serves what. Costs O(prompt) per request and nothing per step."""

    def __init__(self, num_replicas: int) -> None:
        self._work = [0] * num_replicas  # tokens of unfinished requests
        self._served: dict[str, tuple[int, int]] = {}  # request id -> replica, tokens
        # Piece of a prompt, with all before it -> who computed it last; the oldest go first.
        self._seen: OrderedDict[int, int] = OrderedDict()

    def choose(self, request: EngineRequest) -> int:
        """Choose a replica for a request and count it in."""
        leader = self._served.get(request.prefix_leader_id or "")
        pieces = list(_pieces(request))
        if leader is not None:
            # Samples of one prompt share its blocks, whatever else they could gain.
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
        """Who serves an unfinished request."""
        served = self._served.get(request_id)
        return None if served is None else served[0]

    def forget(self, request_id: str) -> None:
        """Count a request out, however it ended. Unknown ids are ignored."""
        served = self._served.pop(request_id, None)
        if served is not None:
            replica, tokens = served
            self._work[replica] -= tokens

    def _spared_tokens(self, pieces: list[int]) -> list[int]:
        """How long the head of a prompt is that each replica has seen."""
        spared = [0] * len(self._work)
        for index, piece in enumerate(pieces):
            replica = self._seen.get(piece)
            if replica is None:
                break
            if spared[replica] == index * _PIECE:
                spared[replica] += _PIECE
        return spared


def _pieces(request: EngineRequest) -> Iterator[int]:
    """A hash for each whole piece of a prompt and all before it."""
    tokens, piece = request.prompt_token_ids, hash(request.cache_salt)
    for end in range(_PIECE, len(tokens) + 1, _PIECE):
        piece = hash((piece, *tokens[end - _PIECE : end]))
        yield piece
