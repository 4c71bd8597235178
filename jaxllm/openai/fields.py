"""What every kind of request may say, and how a body becomes a request.

Each field works or is refused by its name: those that we have are fields of a struct, those that we
know and do not have are in `_NEUTRAL` with the values at which they ask for nothing, and any other
is unknown.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, TypeVar

import msgspec

from jaxllm.errors import ValidationError, refused
from jaxllm.openai.served_model import ServedModel
from jaxllm.openai.wording import converted, renamed
from jaxllm.sampling_params import RequestOutputKind, SamplingParams


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What else a streamed answer tells."""

    include_usage: bool | None = None  # in a last chunk of its own
    continuous_usage_stats: bool | None = None  # so far, in each chunk
    include_obfuscation: Literal[False] | None = None  # chunks are never padded with noise

    @property
    def given(self) -> dict[str, bool]:
        """What was said, as it was."""
        fields = msgspec.structs.asdict(self)
        return {name: value for name, value in fields.items() if value is not None}


class RequestFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that all requests share. None, which is also JSON's null, is the model's default."""

    # Fields that other kinds of request have and this one has not, as in `_NEUTRAL`.
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    # vLLM's extra parameters.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Of requests that are answered live.
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @classmethod
    def read(cls, body: object, *, live: bool = False) -> Self:
        """Make a request of a decoded body; what is unknown, unsupported or no such type is
        refused.

        Args:
          live: whether somebody waits for the answer, whom it can be streamed to.
        """
        if not isinstance(body, dict):
            raise refused("body", body, "it must be a JSON object")
        known = set(cls.__struct_fields__)
        if not live:
            known -= _LIVE.keys()
        neutral = neutral_values(cls)
        for name, value in body.items():
            if name in known:
                continue
            if name not in neutral:
                raise ValidationError(_unknown(name, known | neutral.keys()), parameter=name)
            if value is not None and not any(_same(value, one) for one in neutral[name]):
                allowed = ["leave it out", *(f"give {one!r}" for one in neutral[name])]
                raise refused(name, value, f"not supported; {' or '.join(allowed)}")
        request = converted({k: v for k, v in body.items() if k in known}, cls)
        if request.request_id is not None and not is_request_id(request.request_id):
            raise refused("request_id", request.request_id, f"it must be {REQUEST_ID_IN_WORDS}")
        return request

    def params_over(self, served: ServedModel, **more: Any) -> SamplingParams:
        """The sampling parameters of this request: for one output at its end, or for a stream."""
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", self.stream_options.given, "it needs stream=true")
        given = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        if self.vllm_xargs is not None:
            given["extra_args"] = self.vllm_xargs
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        try:
            params = served.default_params.clone(**given, **more, output_kind=kind)
        except ValidationError as error:
            raise self.in_its_words(error) from error
        # A second step: what was asked for is checked, too.
        return params.clone(max_tokens=served.bounded(params.max_tokens))

    def in_its_words(self, error: ValidationError, place: int | None = None) -> ValidationError:
        """An error of the engine about this request, under the names of its fields.

        Args:
          place: of the prompt that it is about, among those of this request.
        """
        return renamed(error, self.names_of_fields(place))

    def names_of_fields(self, place: int | None) -> dict[str, str]:
        """What the engine names otherwise than this kind of request."""
        return {"extra_args": "vllm_xargs"}


# It is in every piece of an answer, in logs and in headers.
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
REQUEST_ID_IN_WORDS = "1 to 128 printable ASCII characters without spaces"


def is_request_id(text: str) -> bool:
    """Whether a client may call a request so."""
    return _REQUEST_ID.fullmatch(text) is not None


# Fields of the same name and meaning in SamplingParams.
_SAMPLING_FIELDS = [
    name
    for name in RequestFields.__struct_fields__
    if name in SamplingParams.__struct_fields__ and name != "max_tokens"
]

ANY = object()  # stands for every value: the field asks nothing of the engine

# Known fields that we do not have, and the values at which they ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "documents": (),
    "function_call": ("none",),
    "functions": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logprob_token_ids": (),
    "media_io_kwargs": ({},),
    "metadata": (ANY,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_key": (ANY,),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_prompt_text": (False,),
    "safety_identifier": (ANY,),
    "service_tier": ("auto", "default"),
    "session_id": (ANY,),
    "store": (False,),
    "stream_interval": (),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "user": (ANY,),
    "verbosity": (),
    "web_search_options": (),
}

# Fields that only a server has, and the values at which they ask for nothing of others.
_LIVE: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "stream": (False,),
    "stream_options": (),
}

Fields = TypeVar("Fields", bound=msgspec.Struct)


def neutral_values(kind: type[RequestFields]) -> dict[str, tuple[Any, ...]]:
    """The fields that a kind of request may have beside its own, at these values or null."""
    return {**_NEUTRAL, **_LIVE, **kind.NEUTRAL}


def read_fields(body: object, kind: type[Fields]) -> Fields:
    """Make a struct of a decoded body that has no other fields than it."""
    if not isinstance(body, dict):
        raise refused("body", body, "it must be a JSON object")
    known = set(kind.__struct_fields__)
    for name in body.keys() - known:
        raise ValidationError(_unknown(name, known), parameter=name)
    return converted(body, kind)


def _same(value: object, neutral: object) -> bool:
    """Equal, and of the same kind: True is not 1."""
    if neutral is ANY:
        return True
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _unknown(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown field {name!r:.80}{hint}"
