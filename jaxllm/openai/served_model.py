"""What the protocol must know about the model that answers."""

import hashlib
import importlib.metadata
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

import jaxllm
from jaxllm.errors import refused
from jaxllm.frontend.chat_template import Renderer
from jaxllm.frontend.prompt_length import PromptLength
from jaxllm.frontend.tokenizer import Tokenizer
from jaxllm.lora.catalog import AdapterCatalog
from jaxllm.lora.request import LoRARequest
from jaxllm.messages import EngineInfo
from jaxllm.openai.adapter_resolver import AdapterResolver
from jaxllm.openai.errors import NotFoundError
from jaxllm.openai.served_adapters import ServedAdapters, read_lora_modules
from jaxllm.openai.users_resolver import UsersResolver
from jaxllm.parsers.answer_format import AnswerFormat
from jaxllm.pooler_config import Pooling
from jaxllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model and the names that requests may use for it. Answers carry the first name."""

    names: tuple[str, ...]
    tokenizer: Tokenizer | None
    default_params: SamplingParams  # for fields that a request omits
    fingerprint: str  # of everything that answers depend on, except the request
    max_model_len: int
    pooling: Pooling | None = None  # how the engine pools; None: it generates
    max_new_tokens: int | None = None  # the model's recommended limit of an answer, if any
    chat_template: str | None = None  # instead of the tokenizer's own
    trust_request_chat_template: bool = False  # a template is a program
    renderer: Renderer = Renderer()
    answer_format: AnswerFormat = AnswerFormat()
    adapters: ServedAdapters = field(default_factory=ServedAdapters)
    lora_request: LoRARequest | None = None  # the adapter that `named` has found

    @classmethod
    def of(
        cls,
        engine: "Engine",
        names: tuple[str, ...] = (),
        lora_modules: tuple[str, ...] = (),
        lora_resolver_dirs: tuple[str, ...] = (),
        lora_resolver: str | None = None,
        **options: Any,
    ) -> "ServedModel":
        """The model of an engine, with the adapters that --lora-modules names, those in
        directories of --lora-resolver-dirs, and those that --lora-resolver finds."""
        info = engine.info
        names = names or (info.model,)
        adapters = read_lora_modules(lora_modules)
        finds = {"lora_resolver_dirs": lora_resolver_dirs, "lora_resolver": lora_resolver}
        for option, value in finds.items():
            if value and info.adapters is None:
                why = "the engine has no adapters; start it with enable_lora=True"
                raise refused(option, value, why)
        for adapter in adapters:
            if adapter.lora_name in names:
                raise refused("lora_modules", adapter.lora_name, "it is a name of the model")
            engine.adapters.check(adapter)
        users = None if lora_resolver is None else UsersResolver.load(lora_resolver, names[0])
        return cls(
            names=names,
            adapters=ServedAdapters(adapters, AdapterResolver(lora_resolver_dirs), users),
            tokenizer=engine.tokenizer,
            default_params=info.default_sampling_params,
            fingerprint=_fingerprint(info),
            max_model_len=info.max_model_len,
            pooling=info.pooling,
            max_new_tokens=info.max_new_tokens,
            **options,
        )

    def check_name(self, name: str | None) -> None:
        """Refuse a request for another model. A request may omit the name."""
        self.named(name)

    def named(self, name: str | None) -> "ServedModel":
        """The model, or the model with the adapter that has this name, as its answers name it;
        raise NotFoundError."""
        if name is None or name in self.names:
            return self
        adapter = self.adapters.find(name)
        if adapter is not None:
            return replace(self, names=(name,), lora_request=adapter)
        names = [*self.names, *(one.lora_name for one in self.adapters)]
        raise NotFoundError(
            f"model={name!r:.80} is not served here; the names are "
            f"{', '.join(map(repr, names))} (--served-model-name and --lora-modules set them)",
            parameter="model",
            value=name,
        )

    def bounded(self, max_tokens: int | None) -> int | None:
        """The largest number of tokens of an answer; None means as many as the context holds."""
        bounds = [n for n in (max_tokens, self.max_new_tokens) if n is not None]
        return min(bounds, default=None)

    def prompt_length(self, truncate_prompt_tokens: int | None) -> PromptLength:
        """The limit of a request's prompts."""
        return PromptLength.of(self.max_model_len, truncate_prompt_tokens)

    def text_of(self, token_id: int) -> str:
        """The text of a single token, as in logprobs; its id if there is no tokenizer."""
        if self.tokenizer is None:
            return id_as_text(token_id)
        return self.tokenizer.detokenizer.token_text(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a single token. The text of a token shows only whole characters."""
        if self.tokenizer is None:
            return id_as_text(token_id).encode()
        return self.tokenizer.detokenizer.token_bytes(token_id)


class Engine(Protocol):
    """The attributes of any kind of engine that a served model needs."""

    tokenizer: Tokenizer | None
    adapters: AdapterCatalog

    @property
    def info(self) -> EngineInfo: ...


def _fingerprint(info: EngineInfo) -> str:
    """Equal for servers of the same versions with the same model and engine."""
    facts = msgspec.structs.replace(info, model_dir="")
    versions = f"{jaxllm.__version__} {importlib.metadata.version('jax')} ".encode()
    return f"fp_{hashlib.sha256(versions + msgspec.json.encode(facts)).hexdigest()[:16]}"


def id_as_text(token_id: int) -> str:
    return f"token_id:{token_id}"
