"""A request on its way to a replica."""

from typing import Any

import msgspec

from jaxllm.messages import Add
from jaxllm.sampling_params import RequestOutputKind


class Work:
    """The requests of one prompt. The router sees them as they are; Ray sends them as msgpack."""

    def __init__(self, add: Add):
        self.add = add

    @property
    def key(self) -> str:
        return self.add.first.request_id

    @property
    def num_answers(self) -> int:
        return 1 + len(self.add.others)

    @property
    def is_whole(self) -> bool:
        """Whether outputs may come all at once, at the end. Stop strings are found in outputs, and
        must be found early."""
        params = self.add.first.sampling_params
        return params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop

    def __reduce__(self) -> tuple[Any, ...]:
        return _decode, (msgspec.msgpack.encode(self.add),)


def _decode(data: bytes) -> Work:
    return Work(msgspec.msgpack.decode(data, type=Add))
