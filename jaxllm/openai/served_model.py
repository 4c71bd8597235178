"""What the protocol has to know of the model that answers."""

from dataclasses import dataclass
from typing import Any, Protocol

from jaxllm.frontend.chat_template import Renderer
from jaxllm.frontend.tokenizer import Tokenizer
from jaxllm.messages import EngineInfo
from jaxllm.openai.errors import NotFoundError
from jaxllm.openai.parsing import Parsers
from jaxllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model under the names that requests may call it by; answers carry the first one."""

    names: tuple[str, ...]
    tokenizer: Tokenizer | None
    default_params: SamplingParams  # of what a request does not say
    chat_template: str | None = None  # in place of the tokenizer's own
    trust_request_chat_template: bool = False  # a template is a program
    renderer: Renderer = Renderer()
    parsers: Parsers = Parsers()

    @classmethod
    def of(cls, engine: "Engine", names: tuple[str, ...] = (), **options: Any) -> "ServedModel":
        return cls(
            names=names or (engine.info.model,),
            tokenizer=engine.tokenizer,
            default_params=engine.info.default_sampling_params,
            **options,
        )

    def check_name(self, name: str | None) -> None:
        """Refuse a request that names another model; one that names none means this one."""
        if name is not None and name not in self.names:
            raise NotFoundError(
                f"model={name!r:.80} is not served here; the names are "
                f"{', '.join(map(repr, self.names))} (--served-model-name sets them)",
                parameter="model",
                value=name,
            )

    def text_of(self, token_id: int) -> str:
        """The text of one token alone, as logprobs show it; without a tokenizer it has none."""
        if self.tokenizer is None:
            return id_as_text(token_id)
        return self.tokenizer.detokenizer.token_text(token_id)


class Engine(Protocol):
    """Of any kind of engine, what a served model is made of."""

    tokenizer: Tokenizer | None

    @property
    def info(self) -> EngineInfo: ...


def id_as_text(token_id: int) -> str:
    return f"token_id:{token_id}"
