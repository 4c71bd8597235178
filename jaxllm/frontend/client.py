"""How a frontend reaches an engine core in its own process."""

from typing import Any, Protocol

from jaxllm.config import EngineConfig
from jaxllm.engine.commands import Answer, Command
from jaxllm.errors import ValidationError
from jaxllm.frontend.tokenizer import Tokenizer, load_tokenizer
from jaxllm.importing import without_collections
from jaxllm.messages import EngineInfo, EngineOutput, EngineRequest
from jaxllm.metrics.startup import Phase


class EngineClient(Protocol):
    """The engine as a frontend uses it."""

    @property
    def info(self) -> EngineInfo: ...

    def add_request(self, request: EngineRequest) -> None: ...

    def abort_requests(self, request_ids: list[str]) -> None: ...

    def step(self) -> list[EngineOutput]:
        """Go on, and return the new outputs; there may be none while steps are in flight."""
        ...

    def has_work(self) -> bool: ...

    def call(self, command: Command[Any, Answer]) -> Answer:
        """Run a command between two steps."""
        ...

    @property
    def startup(self) -> list[Phase]: ...

    def shutdown(self) -> None: ...


def find_model(config: EngineConfig) -> str:
    """Return the local directory of the model; download it from the hub if necessary."""
    from jaxllm.weights.checkpoint import resolve_model_dir

    model = config.model
    return str(resolve_model_dir(model.model, model.revision, model.download_dir))


def check_model(config: EngineConfig) -> None:
    """Raise the error that would keep an engine from starting, without loading weights."""
    from jaxllm.plan.make_plan import make_plan

    make_plan(config)


def load_engine_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """Load the config's tokenizer; None with skip_tokenizer_init."""
    if config.model.skip_tokenizer_init:
        return None
    model_dir = find_model(config)
    try:
        return load_tokenizer(config.model, model_dir)
    except ValidationError:
        # Often the model is broken, and then the model's error is the better answer.
        check_model(config)
        raise


def start_engine(config: EngineConfig) -> EngineClient:
    """Start an engine in this process, which the caller steps."""
    # The device side begins here: until now neither jax nor a model has been loaded.
    with without_collections():
        from jaxllm.engine.launch import make_engine

    return make_engine(config)
