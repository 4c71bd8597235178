"""What the protocol has to know of the model that answers."""

import hashlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

import jaxllm
from jaxllm.frontend.chat_template import Renderer
from jaxllm.frontend.prompt_length import PromptLength
from jaxllm.frontend.tokenizer import Tokenizer
from jaxllm.messages import EngineInfo
from jaxllm.openai.errors import NotFoundError
from jaxllm.parsers.answer_format import AnswerFormat
from jaxllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model under the names that requests may call it by; answers carry the first one."""

    names: tuple[str, ...]
    tokenizer: Tokenizer | None
    default_params: SamplingParams  # of what a request does not say
    fingerprint: str  # of what answers depend on beside the request
    max_model_len: int
    max_new_tokens: int | None = None  # no answer is longer, if the model recommends a bound
    chat_template: str | None = None  # in place of the tokenizer's own
    trust_request_chat_template: bool = False  # a template is a program
    renderer: Renderer = Renderer()
    answer_format: AnswerFormat = AnswerFormat()

    @classmethod
    def of(cls, engine: "Engine", names: tuple[str, ...] = (), **options: Any) -> "ServedModel":
        info = engine.info
        return cls(
            names=names or (info.model,),
            tokenizer=engine.tokenizer,
            default_params=info.default_sampling_params,
            fingerprint=_fingerprint(info),
            max_model_len=info.max_model_len,
            max_new_tokens=info.max_new_tokens,
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

    def bounded(self, max_tokens: int | None) -> int | None:
        """The most tokens of an answer for which so many were asked; None is all that fit."""
        bounds = [n for n in (max_tokens, self.max_new_tokens) if n is not None]
        return min(bounds, default=None)

    def prompt_length(self, truncate_prompt_tokens: int | None) -> PromptLength:
        """How long the prompts of a request may be that says this."""
        return PromptLength.of(self.max_model_len, truncate_prompt_tokens)

    def text_of(self, token_id: int) -> str:
        """The text of one token alone, as logprobs show it; without a tokenizer it has none."""
        if self.tokenizer is None:
            return id_as_text(token_id)
        return self.tokenizer.detokenizer.token_text(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token, of which the text shows only whole characters."""
        if self.tokenizer is None:
            return id_as_text(token_id).encode()
        return self.tokenizer.detokenizer.token_bytes(token_id)


class Engine(Protocol):
    """Of any kind of engine, what a served model is made of."""

    tokenizer: Tokenizer | None

    @property
    def info(self) -> EngineInfo: ...


def _fingerprint(info: EngineInfo) -> str:
    """Equal for servers of the same versions with the same model and engine."""
    facts = msgspec.structs.replace(info, model_dir="")
    versions = f"{jaxllm.__version__} {importlib.metadata.version('jax')} ".encode()
    return f"fp_{hashlib.sha256(versions + msgspec.json.encode(facts)).hexdigest()[:16]}"


def id_as_text(token_id: int) -> str:
    return f"token_id:{token_id}"
