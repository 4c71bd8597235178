"""`kv_transfer_params` of requests and answers, with vLLM's names.

A request with `do_remote_decode` goes to an engine that gives blocks. Its answer says where they
are, and a request with that goes to an engine that takes them. Who stands between need not
understand what it passes on.
"""

from typing import Any, NamedTuple

from jaxllm.config import EngineConfig
from jaxllm.errors import refused
from jaxllm.handover.secret import is_marked, mark
from jaxllm.handover.source import BlockSource, HandOver
from jaxllm.sampling_params import SamplingParams

NAME = "kv_transfer_params"
_FLAGS = ("do_remote_decode", "do_remote_prefill")
_PLACE = ("remote_host", "remote_port", "remote_mark")
# What proxies send without a value to the engine that computes a prompt.
_EMPTY = ("remote_engine_id", "remote_block_ids", *_PLACE)


class Transfer(NamedTuple):
    """What a request asks for."""

    gives: bool = False  # its blocks to others
    source: BlockSource | None = None  # of its blocks


class Transfers:
    """Reads the parameters of requests for one engine, and makes those of answers."""

    def __init__(self, config: EngineConfig, hand_over: HandOver | None):
        self._its = hand_over
        self._secret = b"" if hand_over is None else config.hand_over.read_secret()

    def take(self, params: SamplingParams) -> Transfer:
        """Take the parameters out of `extra_args`."""
        if not params.extra_args or NAME not in params.extra_args:
            return Transfer()
        rest = dict(params.extra_args)
        given = rest.pop(NAME)
        params.extra_args = rest or None
        return Transfer() if given is None else self._read(given)

    def of_answer(self, replica: int) -> dict[str, Any]:
        """Where the blocks of a request are that a replica has answered."""
        assert self._its is not None and self._its.gives, "the engine gives none"
        source = self._its.gives[replica]
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_host": source.host,
            "remote_port": source.port,
            "remote_mark": mark(self._secret, source),
        }

    def _read(self, given: object) -> Transfer:
        if not isinstance(given, dict):
            raise refused(NAME, given, "it must be an object")
        for name, value in given.items():
            if name not in (*_FLAGS, *_EMPTY) or (name not in (*_FLAGS, *_PLACE) and value):
                raise refused(f"{NAME}.{name}", value, f"known are {', '.join((*_FLAGS, *_PLACE))}")
        for name in _FLAGS:
            if not isinstance(given.get(name, False), bool):
                raise refused(f"{NAME}.{name}", given[name], "it must be true or false")
        gives, takes = (bool(given.get(name)) for name in _FLAGS)
        if gives and takes:
            raise refused(NAME, given, "an answer gives its blocks or takes some, not both")
        if gives and (self._its is None or not self._its.gives):
            raise self._refused("do_remote_decode", "gives no blocks", "kv_producer")
        if takes and (self._its is None or not self._its.takes):
            raise self._refused("do_remote_prefill", "takes no blocks", "kv_consumer")
        return Transfer(gives, self._source(given) if takes else None)

    def _source(self, given: dict[Any, Any]) -> BlockSource:
        host, port, its_mark = (given.get(name) for name in _PLACE)
        if not isinstance(host, str) or not isinstance(its_mark, str):
            why = "it must have remote_host, remote_port and remote_mark, as an answer has them"
            raise refused(NAME, given, why)
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 2**16:
            raise refused(f"{NAME}.remote_port", port, "ports are 1 to 65535")
        source = BlockSource(host, port)
        if not is_marked(self._secret, source, its_mark):
            why = f"no engine with this engine's secret has given out the address {source}"
            raise refused(f"{NAME}.remote_mark", its_mark, why)
        return source

    def _refused(self, name: str, what: str, role: str) -> Exception:
        return refused(f"{NAME}.{name}", True, f"the engine {what}; start it with kv_role={role!r}")
