"""How the frontend reaches an engine core. The only file on this side that knows the engine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from jaxllm.config import EngineConfig
from jaxllm.frontend.router import Router
from jaxllm.messages import EngineInfo, EngineOutput, EngineRequest
from jaxllm.metrics.stats import EngineStats

if TYPE_CHECKING:
    from jaxllm.engine.core import EngineCore


class EngineClient(Protocol):
    """An engine core, wherever it runs."""

    @property
    def info(self) -> EngineInfo: ...

    def add_request(self, request: EngineRequest) -> None: ...

    def abort_requests(self, request_ids: list[str]) -> None: ...

    def get_outputs(self) -> list[EngineOutput]:
        """What the engine produced since the last call; may be empty while work is under way."""
        ...

    def has_work(self) -> bool: ...

    def reset_prefix_cache(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def shutdown(self) -> None: ...


def find_model(config: EngineConfig) -> str:
    """The local directory of the model, fetched from the hub if need be."""
    from jaxllm.weights.checkpoint import resolve_model_dir

    model = config.model
    return str(resolve_model_dir(model.model, model.revision, model.download_dir))


def check_model(config: EngineConfig) -> None:
    """Raise what keeps an engine from starting, if anything does, without loading a weight."""
    from jaxllm.runner.plan import make_plan

    make_plan(config)


def make_client(config: EngineConfig) -> EngineClient:
    """Start what the config asks for: an engine core, or several replicas of it."""
    # Here begins the device side: until now neither jax nor a model has been loaded.
    from jaxllm.engine.core import make_cores

    clients = [InProcessClient(core) for core in make_cores(config)]
    return clients[0] if len(clients) == 1 else DataParallelClient(clients)


class InProcessClient:
    """An engine core in this process, which steps when its outputs are asked for."""

    def __init__(self, core: "EngineCore"):
        self._core = core
        self.info: EngineInfo = core.info

    def add_request(self, request: EngineRequest) -> None:
        self._core.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._core.abort_requests(request_ids)

    def get_outputs(self) -> list[EngineOutput]:
        return self._core.step()

    def has_work(self) -> bool:
        return self._core.has_work()

    def reset_prefix_cache(self) -> bool:
        return self._core.reset_prefix_cache()

    def stats(self) -> EngineStats:
        return self._core.stats()

    def shutdown(self) -> None:
        self._core.shutdown()


class DataParallelClient:
    """Several engine cores, each with devices of its own and all of the model.

    A step of each is on its devices while the host plans those of the others.
    """

    def __init__(self, cores: Sequence[EngineClient]):
        self._cores = cores
        self._router = Router(len(cores))
        self.info: EngineInfo = self._cores[0].info

    def add_request(self, request: EngineRequest) -> None:
        replica = self._router.choose(request)
        try:
            self._cores[replica].add_request(request)
        except BaseException:
            self._router.forget(request.request_id)
            raise

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            replica = self._router.replica_of(request_id)
            if replica is not None:
                self._cores[replica].abort_requests([request_id])
                self._router.forget(request_id)

    def get_outputs(self) -> list[EngineOutput]:
        outputs = []
        for core in self._cores:
            if core.has_work():
                outputs += core.get_outputs()
        for output in outputs:
            if output.finish_reason is not None:
                self._router.forget(output.request_id)
        return outputs

    def has_work(self) -> bool:
        return any(core.has_work() for core in self._cores)

    def reset_prefix_cache(self) -> bool:
        return all([core.reset_prefix_cache() for core in self._cores])

    def stats(self) -> EngineStats:
        return EngineStats.total([core.stats() for core in self._cores])

    def shutdown(self) -> None:
        for core in self._cores:
            core.shutdown()
