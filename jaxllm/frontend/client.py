"""How the frontend reaches an engine core. The only file on this side that knows the engine."""

from typing import Any, Protocol

from jaxllm.config import EngineConfig
from jaxllm.engine.commands import Answer, Command
from jaxllm.errors import ValidationError
from jaxllm.frontend.tokenizer import Tokenizer, load_tokenizer
from jaxllm.messages import EngineInfo, EngineOutput, EngineRequest
from jaxllm.metrics.startup import Phase


class EngineClient(Protocol):
    """What a frontend does with an engine."""

    @property
    def info(self) -> EngineInfo: ...

    def add_request(self, request: EngineRequest) -> None: ...

    def abort_requests(self, request_ids: list[str]) -> None: ...

    def step(self) -> list[EngineOutput]:
        """Go on, and say what there is; may be nothing while work is under way."""
        ...

    def has_work(self) -> bool: ...

    def call(self, command: Command[Any, Answer]) -> Answer:
        """Do what a command says, between two steps."""
        ...

    @property
    def startup(self) -> list[Phase]: ...

    def shutdown(self) -> None: ...


def find_model(config: EngineConfig) -> str:
    """The local directory of the model, fetched from the hub if need be."""
    from jaxllm.weights.checkpoint import resolve_model_dir

    model = config.model
    return str(resolve_model_dir(model.model, model.revision, model.download_dir))


def check_model(config: EngineConfig) -> None:
    """Raise what keeps an engine from starting, if anything does, without loading a weight."""
    from jaxllm.plan.engine_plan import make_plan

    make_plan(config)


def load_engine_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The tokenizer that the config asks for, if any."""
    if config.model.skip_tokenizer_init:
        return None
    model_dir = find_model(config)
    try:
        return load_tokenizer(config.model, model_dir)
    except ValidationError:
        # Often it is the model that is broken, and then that is the better answer.
        check_model(config)
        raise


def start_engine(config: EngineConfig) -> EngineClient:
    """An engine in this process, which steps when it is told to."""
    # Here begins the device side: until now neither jax nor a model has been loaded.
    from jaxllm.engine.launch import make_engine

    return make_engine(config)
