"""How the frontend reaches an engine core. The only file on this side that knows the engine."""

from typing import Protocol

from jaxllm.config import EngineConfig
from jaxllm.messages import EngineInfo, EngineOutput, EngineRequest
from jaxllm.metrics.stats import EngineStats


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


class InProcessClient:
    """An engine core in this process, which steps when its outputs are asked for."""

    def __init__(self, config: EngineConfig):
        # Here begins the device side: until now neither jax nor a model has been loaded.
        from jaxllm.engine.core import EngineCore

        self._core = EngineCore(config)
        self.info: EngineInfo = self._core.info

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
