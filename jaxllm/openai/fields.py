"""The fields of every kind of request, and how a body becomes a request.

A field works or is refused by its name. Supported fields are fields of a struct. Fields that are
known but not supported are in `_NEUTRAL`, with the values at which they have no effect. Any other
field is unknown.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, TypeVar

import msgspec

from jaxllm.errors import ValidationError, refused
from jaxllm.openai.response_format import ResponseFormat
from jaxllm.openai.served_model import ServedModel
from jaxllm.openai.wording import converted, renamed
from jaxllm.parsers.reasoning.base import Reasoning
from jaxllm.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from jaxllm.structured_output.params import FORMER_NAMES


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a streamed answer reports in addition."""

    include_usage: bool | None = None  # usage in a last chunk of its own
    continuous_usage_stats: bool | None = None  # usage so far in each chunk
    include_obfuscation: Literal[False] | None = None  # padding of chunks is not supported

    @property
    def given(self) -> dict[str, bool]:
        """The fields that the request sets."""
        fields = msgspec.structs.asdict(self)
        return {name: value for name, value in fields.items() if value is not None}


class RequestFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that all requests share. None, like JSON's null, means the model's default."""

    # Fields of other kinds of request that this kind does not have, as in `_NEUTRAL`.
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
    response_format: ResponseFormat | None = None
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
    structured_outputs: StructuredOutputsParams | None = None
    vllm_xargs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Only requests to the server have these.
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @classmethod
    def read(cls, body: object, *, live: bool = False) -> Self:
        """Make a request of a decoded body; refuse fields that are unknown, unsupported or of the
        wrong type.

        Args:
          live: whether a client waits for the answer, so that it can be streamed.
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
            if name in FORMER_NAMES:
                raise refused(name, value, f"it is now called {FORMER_NAMES[name]}")
            if name not in neutral:
                raise ValidationError(_unknown(name, known | neutral.keys()), parameter=name)
            if value is not None and not any(_same(value, one) for one in neutral[name]):
                allowed = ["leave it out", *(f"give {one!r}" for one in neutral[name])]
                raise refused(name, value, f"not supported; {' or '.join(allowed)}")
        request = converted({k: v for k, v in body.items() if k in known}, cls)
        if request.request_id is not None and not is_request_id(request.request_id):
            raise refused("request_id", request.request_id, f"it must be {REQUEST_ID_IN_WORDS}")
        return request

    def _transfer(self) -> dict[str, Any]:
        """What goes to `handover` as a parameter, with vLLM's name."""
        name, given = "kv_transfer_params", self.kv_transfer_params
        assert given is not None
        if self.use_beam_search:
            raise refused(name, given, "not with use_beam_search, which has many prompts")
        if self.stream and given.get("do_remote_decode"):
            why = "the answer says where the blocks are, and a stream does not; leave stream out"
            raise refused(f"{name}.do_remote_decode", True, why)
        return {name: given}

    def params_over(self, served: ServedModel, **more: Any) -> SamplingParams:
        """The sampling parameters of this request, for one final output or for a stream."""
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", self.stream_options.given, "it needs stream=true")
        given = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        if self.vllm_xargs is not None:
            if "kv_transfer_params" in self.vllm_xargs:
                raise refused("vllm_xargs", self.vllm_xargs, "kv_transfer_params is a field itself")
            given["extra_args"] = self.vllm_xargs
        if self.kv_transfer_params:
            given["extra_args"] = {**(self.vllm_xargs or {}), **self._transfer()}
        if self.use_beam_search:
            given["n"] = 1  # its n answers are the best of one search
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        try:
            given["structured_outputs"] = self.form(served)
            params = served.default_params.clone(**(given | more), output_kind=kind)
        except ValidationError as error:
            raise self.in_its_words(error) from error
        # A second step, so that the requested value is validated, too.
        return params.clone(max_tokens=served.bounded(params.max_tokens))

    def beam_search(self, params: SamplingParams, served: ServedModel) -> BeamSearchParams | None:
        """The parameters of a search for the likeliest answers, if the request wants that in place
        of samples with these parameters."""
        if not self.use_beam_search:
            if self.length_penalty not in (None, 1):
                raise refused("length_penalty", self.length_penalty, "it needs use_beam_search")
            return None
        for name in self.__struct_fields__:
            value = getattr(self, name)
            neutral = _NOT_OF_BEAMS.get(name)
            if neutral is None or value is None:
                continue
            if not any(_same(value, one) for one in neutral):
                why = "beam search takes the likeliest tokens, whatever this says; leave it out"
                raise refused(name, value, why)
        given = {name: value for name in _OF_BEAMS if (value := getattr(self, name)) is not None}
        try:
            return BeamSearchParams(
                beam_width=self.n or 1,
                max_tokens=params.max_tokens or served.max_model_len,
                temperature=self.temperature or 0.0,
                **given,
            )
        except ValidationError as error:
            raise self.in_its_words(error) from error

    def in_its_words(self, error: ValidationError, place: int | None = None) -> ValidationError:
        """Rename the fields in an engine's error to their names in this request.

        Args:
          place: index of the prompt that the error is about.
        """
        return renamed(error, self.names_of_fields(place))

    def names_of_fields(self, place: int | None) -> dict[str, str]:
        """Engine parameter -> field of this kind of request, where the names differ."""
        return {"extra_args": "vllm_xargs", "beam_width": "n"} | (
            {} if self.response_format is None else self.response_format.names
        )

    @property
    def is_background(self) -> bool:
        return False

    @property
    def conversation(self) -> Any:
        """The chat request whose template makes the prompt, if a template does."""
        return None

    def form(self, served: ServedModel) -> StructuredOutputsParams | None:
        """The form that the answer shall have; raise ValidationError."""
        if self.response_format is None:
            return self.structured_outputs
        return self.response_format.over(self.structured_outputs)

    def reasoning(self, served: ServedModel) -> Reasoning | None:
        """What may come before this form."""
        tags = served.answer_format.reasoning
        return None if tags is None else Reasoning(tags)


# The id is in every chunk of an answer, in logs and in headers.
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
REQUEST_ID_IN_WORDS = "1 to 128 printable ASCII characters without spaces"


def is_request_id(text: str) -> bool:
    """Whether a client may use this text as a request id."""
    return _REQUEST_ID.fullmatch(text) is not None


# Fields with the same name and meaning in SamplingParams.
_SAMPLING_FIELDS = [
    name
    for name in RequestFields.__struct_fields__
    if name in SamplingParams.__struct_fields__ and name not in ("max_tokens", "structured_outputs")
]

# Fields of a beam search with the same name.
_OF_BEAMS = ("ignore_eos", "include_stop_str_in_output", "length_penalty", "skip_special_tokens")

# Fields that have no effect on the likeliest answers, and the values at which they say so.
_NOT_OF_BEAMS: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": (),
    "seed": (),
    "stop": ([],),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "top_k": (0, -1),
    "top_p": (1,),
    "vllm_xargs": (),
}

ANY = object()  # stands for every value: the field has no effect

# Known fields that are not supported, and the values at which they have no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "documents": (),
    "function_call": ("none",),
    "functions": (),
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
    "return_prompt_text": (False,),
    "safety_identifier": (ANY,),
    "service_tier": ("auto", "default"),
    "session_id": (ANY,),
    "store": (False,),
    "stream_interval": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncation_side": ("left",),
    "user": (ANY,),
    "verbosity": (),
    "web_search_options": (),
}

# Fields of requests to a server, and the values at which other requests may have them.
_LIVE: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "stream": (False,),
    "stream_options": (),
    "use_beam_search": (False,),
}

Fields = TypeVar("Fields", bound=msgspec.Struct)


def neutral_values(kind: type[RequestFields]) -> dict[str, tuple[Any, ...]]:
    """Fields that a kind of request may have besides its own, if they have these values or null."""
    return {**_NEUTRAL, **_LIVE, **kind.NEUTRAL}


def read_fields(body: object, kind: type[Fields]) -> Fields:
    """Make a struct of a decoded body; refuse unknown fields."""
    if not isinstance(body, dict):
        raise refused("body", body, "it must be a JSON object")
    known = set(kind.__struct_fields__)
    for name in body.keys() - known:
        raise ValidationError(_unknown(name, known), parameter=name)
    return converted(body, kind)


def _same(value: object, neutral: object) -> bool:
    """Whether two values are equal and of the same kind: True is not 1."""
    if neutral is ANY:
        return True
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _unknown(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown field {name!r:.80}{hint}"
