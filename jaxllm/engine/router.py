"""Chooses the replica that serves a request: the one with the least work, less its cached tokens.

Work is counted in tokens: of the prompt, and of the answer at its longest. A replica that has seen
the head of a prompt need not compute it again, so these tokens are subtracted from its work. If it
still has more work than another replica, the other one gets the request.

Replicas within an engine, under Ray Serve and in a simulation are chosen by this same object.
"""

import random
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, Literal, TypeVar

from jaxllm.messages import EngineRequest

Replica = TypeVar("Replica", bound=Hashable)
# "least_work" does not know prefixes, and "random" knows nothing: what the first one is worth.
RoutingPolicy = Literal["prefix", "least_work", "random"]

# Prompts are remembered in pieces of _PIECE tokens, at most _MAX_PIECES in all.
_PIECE = 64
_MAX_PIECES = 1 << 17


class Router(Generic[Replica]):
    """Remembers the replica of each request. Costs O(prompt) per request and nothing per step."""

    def __init__(self, replicas: Iterable[Replica], policy: RoutingPolicy = "prefix") -> None:
        self._policy = policy
        self._chance = random.Random(0)
        self._work = {replica: 0 for replica in replicas}  # tokens of unfinished requests
        self._served: dict[str, tuple[Replica, int]] = {}  # request id -> replica, tokens
        # Hash of a piece and all before it -> the replica that computed it last; oldest first.
        self._seen: OrderedDict[int, Replica] = OrderedDict()

    def set_replicas(self, replicas: Iterable[Replica]) -> None:
        """Choose among these from now on. A new one has no work, and one that is gone has nothing
        of what it has seen, should it come back."""
        replicas = list(replicas)
        gone = self._work.keys() - replicas
        self._work = dict.fromkeys(replicas, 0)
        for replica, tokens in self._served.values():
            if replica in self._work:
                self._work[replica] += tokens
        if gone:
            kept = ((piece, one) for piece, one in self._seen.items() if one not in gone)
            self._seen = OrderedDict(kept)

    def choose(self, request: EngineRequest, num_answers: int = 1) -> Replica:
        """Choose a replica for a request, and add the request to its work."""
        return self.rank(request, num_answers)[0]

    def rank(self, request: EngineRequest, num_answers: int = 1) -> list[Replica]:
        """Choose a replica for a request, and add the request to its work. Return all replicas, the
        chosen one first, in the order in which they should take the request in its place."""
        pieces = list(_pieces(request))
        leader = self._served.get(request.prefix_leader_id or "")
        # Samples of one prompt share its blocks, so they must be on one replica.
        ranked = self._in_order(pieces) if leader is None else [leader[0]]
        for piece in pieces:
            self._seen[piece] = ranked[0]
            self._seen.move_to_end(piece)
        while len(self._seen) > _MAX_PIECES:
            self._seen.popitem(last=False)
        tokens = len(request.prompt_token_ids) + num_answers * request.max_tokens
        self._serve(request.request_id, ranked[0], tokens)
        return ranked

    def replica_of(self, request_id: str) -> Replica | None:
        """The replica that serves an unfinished request."""
        served = self._served.get(request_id)
        return None if served is None else served[0]

    def move(self, request_id: str, replica: Replica) -> None:
        """Note that another replica than the chosen one has taken a request."""
        served = self._served.get(request_id)
        if served is not None and served[0] != replica:
            self._serve(request_id, replica, served[1])

    def forget(self, request_id: str) -> None:
        """Subtract a request that has ended from its replica's work. Unknown ids are ignored."""
        served = self._served.pop(request_id, None)
        if served is not None:
            replica, tokens = served
            if replica in self._work:
                self._work[replica] -= tokens

    def _serve(self, request_id: str, replica: Replica, tokens: int) -> None:
        self.forget(request_id)
        self._served[request_id] = replica, tokens
        if replica in self._work:
            self._work[replica] += tokens

    def _in_order(self, pieces: list[int]) -> list[Replica]:
        replicas, work = list(self._work), self._work
        if self._policy == "random":
            self._chance.shuffle(replicas)
            return replicas
        if self._policy == "least_work":
            return sorted(replicas, key=lambda replica: work[replica])
        spared = self._spared_tokens(pieces)
        return sorted(replicas, key=lambda r: (work[r] - spared[r], work[r]))

    def _spared_tokens(self, pieces: list[int]) -> dict[Replica, int]:
        """The length in tokens of the prompt's head that each replica has seen."""
        spared = dict.fromkeys(self._work, 0)
        for index, piece in enumerate(pieces):
            replica = self._seen.get(piece)
            if replica is None or replica not in spared:
                break
            if spared[replica] == index * _PIECE:
                spared[replica] += _PIECE
        return spared


def _pieces(request: EngineRequest) -> Iterator[int]:
    """Yield a hash for each whole piece of a prompt, which covers all before it too."""
    embeds = None if request.embeds is None else request.embeds.digests
    tokens, piece = request.prompt_token_ids, hash((request.cache_salt, embeds))
    for end in range(_PIECE, len(tokens) + 1, _PIECE):
        piece = hash((piece, *tokens[end - _PIECE : end]))
        yield piece
