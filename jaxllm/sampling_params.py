"""How the next token is chosen. Every field works on every path, or raises; none is ignored.

`Limits` has all bounds on the list sizes of a request. They are the sizes of the sampler's device
tables, so no table can overflow inside a step.
"""

import enum
import math
import numbers
import operator
from typing import Any

import msgspec

from jaxllm.errors import refused
from jaxllm.logging import init_logger
from jaxllm.structured_output.params import FORMER_NAMES
from jaxllm.structured_output.params import StructuredOutputsParams as StructuredOutputsParams

logger = init_logger(__name__)


class Limits:
    """The upper bounds for one request. Some are the sizes of device tables."""

    MAX_N = 16384
    MAX_STOP_STRINGS = 64
    MAX_STOP_STRING_CHARS = 1024
    MAX_STOP_TOKEN_IDS = 128  # with the end-of-sequence ids; sampler table
    MAX_BAD_WORD_CHARS = 1024
    MAX_BAD_WORDS = 128  # token sequences after tokenisation; sampler table
    MAX_BAD_WORD_TOKENS = 16  # sampler table
    MAX_LOGIT_BIAS = 1024  # sampler table
    MAX_SALT_CHARS = 128
    MAX_TEMPERATURE = 1000.0  # all tokens are about as likely; beyond float32 there are no numbers


# How many logprobs of a position a step computes at most: as many as OpenAI's API allows. For a
# request that wants more, the host computes them from the position's logits.
MAX_STEP_LOGPROBS = 20


class RequestOutputKind(enum.IntEnum):
    """What each RequestOutput of a request holds."""

    CUMULATIVE = 0  # all so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # one output, at the end


_GREEDY_EPSILON = 1e-5
_MIN_TEMPERATURE = 1e-2


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling parameters, with the names, defaults and ranges that vLLM's users know."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: dict[str, Any] | None = None
    structured_outputs: StructuredOutputsParams | None = None  # or a dict of its fields
    guided_decoding: None = None  # what vLLM once called structured_outputs; refused

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else _copied(self.stop or [])
        self.stop_token_ids = _copied(self.stop_token_ids or [])
        self.bad_words = _copied(self.bad_words or [])
        self.allowed_token_ids = _copied(self.allowed_token_ids)
        if self.seed == -1:
            self.seed = None
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        self.validate()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_EPSILON

    def clone(self, **changes: Any) -> "SamplingParams":
        """Return a copy with some fields replaced; lists are not shared with the original."""
        copy = msgspec.structs.replace(self, **changes)
        return copy

    def validate(self) -> None:
        """Check all that can be checked without a model. The constructor calls this, and the input
        processor does again, since a field may have been assigned in between. Numbers become
        Python's own: numpy's numbers, and integers beyond 64 bits, cannot cross processes."""
        self.n = _integer("n", self.n, 1, Limits.MAX_N)
        self.temperature = _number("temperature", self.temperature, 0.0, Limits.MAX_TEMPERATURE)
        if _GREEDY_EPSILON <= self.temperature < _MIN_TEMPERATURE:
            # Dividing float32 logits by less than this overflows before the softmax.
            logger.warning(
                "temperature=%s is raised to %s; use 0 for greedy sampling",
                self.temperature,
                _MIN_TEMPERATURE,
            )
            self.temperature = _MIN_TEMPERATURE
        self.top_p = _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        self.top_k = _integer("top_k", self.top_k, -1, 2**31 - 1)
        self.min_p = _number("min_p", self.min_p, 0.0, 1.0)
        self.presence_penalty = _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = _number(
            "repetition_penalty", self.repetition_penalty, 0.0, math.inf, low_open=True
        )
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refused(
                "min_tokens", self.min_tokens, f"it must be at most max_tokens={self.max_tokens}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                setattr(self, name, _integer(name, getattr(self, name), -1, 2**31 - 1))
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        ):
            _boolean(name, getattr(self, name))
        self._validate_lists()
        if self.is_greedy and self.n > 1:
            raise refused("n", self.n, "greedy sampling (temperature=0) gives one answer; use n=1")
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            raise refused("output_kind", self.output_kind, "use RequestOutputKind") from None
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise refused("extra_args", self.extra_args, "it must be a dict")
        if self.guided_decoding is not None:
            now = FORMER_NAMES["guided_decoding"]
            raise refused("guided_decoding", self.guided_decoding, f"it is now called {now}")
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)

    def _validate_lists(self) -> None:
        stop = _list("stop", self.stop, Limits.MAX_STOP_STRINGS)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise refused("stop", text, "stop strings must be non-empty strings")
            check_is_text("stop", text)
            _short("stop", text, "a stop string", Limits.MAX_STOP_STRING_CHARS)
        if stop and not self.detokenize:
            raise refused("stop", stop, "stop strings need detokenize=True")
        stop_ids = _list("stop_token_ids", self.stop_token_ids, Limits.MAX_STOP_TOKEN_IDS)
        self.stop_token_ids = _token_ids("stop_token_ids", stop_ids)
        for word in _list("bad_words", self.bad_words, Limits.MAX_BAD_WORDS):
            if not isinstance(word, str) or not word:
                raise refused("bad_words", word, "bad words must be non-empty strings")
            check_is_text("bad_words", word)
            _short("bad_words", word, "a bad word", Limits.MAX_BAD_WORD_CHARS)
        if self.allowed_token_ids is not None:
            allowed = _list("allowed_token_ids", self.allowed_token_ids, 2**31 - 1)
            if not allowed:
                raise refused("allowed_token_ids", allowed, "it must not be empty")
            # Each id once, so there are never more than the vocabulary has: the input processor
            # checks that each id is in it.
            self.allowed_token_ids = _token_ids("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise refused("logit_bias", self.logit_bias, "it must map token ids to numbers")
            if len(self.logit_bias) > Limits.MAX_LOGIT_BIAS:
                raise refused(
                    "logit_bias",
                    f"{len(self.logit_bias)} entries",
                    f"at most {Limits.MAX_LOGIT_BIAS} are allowed",
                )
            # JSON objects have string keys.
            try:
                self.logit_bias = {
                    int(token) if isinstance(token, str) else operator.index(token): bias
                    for token, bias in self.logit_bias.items()
                }
            except (TypeError, ValueError):
                raise refused("logit_bias", self.logit_bias, "its keys must be token ids") from None
            self.logit_bias = {
                _integer("logit_bias", token, 0, 2**31 - 1): _number(
                    f"logit_bias[{token}]", bias, -math.inf, math.inf
                )
                for token, bias in self.logit_bias.items()
            }


class BeamSearchParams(msgspec.Struct, kw_only=True, frozen=True):
    """Parameters of `LLM.beam_search`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: None = None  # refused: beams are scored by logits, which have no form

    def __post_init__(self) -> None:
        if self.structured_outputs is not None:
            raise refused(
                "structured_outputs", self.structured_outputs, "beam search follows no form"
            )
        _integer("beam_width", self.beam_width, 1, 256)
        _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _number("temperature", self.temperature, 0.0, Limits.MAX_TEMPERATURE)
        # It is an exponent of lengths: beyond these bounds scores would overflow.
        _number("length_penalty", self.length_penalty, -32.0, 32.0)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _boolean(name, getattr(self, name))


def check_is_text(name: str, text: str) -> None:
    """Refuse a string that no encoding can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise refused(name, text, "it holds half a surrogate pair, which is no text") from None


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise refused(name, value, "it must be True or False")


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise refused(name, value, "it must be an integer")
    if not low <= int(value) <= high:
        raise refused(name, value, f"it must be between {low} and {high}")
    return int(value)


def _token_ids(name: str, values: list) -> list[int]:
    """Validated token ids, without duplicates."""
    return list(dict.fromkeys(_integer(name, value, 0, 2**31 - 1) for value in values))


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise refused(name, value, "it must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (low_open and number == low):
        bounds = ["finite"]
        if low > -math.inf:
            bounds.append(f"{'above' if low_open else 'at least'} {low}")
        if high < math.inf:
            bounds.append(f"at most {high}")
        raise refused(name, value, f"it must be {', '.join(bounds)}")
    return number


def _short(name: str, text: str, what: str, most: int) -> None:
    if len(text) > most:
        raise refused(name, f"{len(text)} characters", f"{what} has at most {most}")


def _copied(value: Any) -> Any:
    """Copy a list; return other objects as they are, for `validate` to refuse."""
    return list(value) if isinstance(value, list | tuple | set) else value


def _list(name: str, value: object, most: int) -> list:
    if not isinstance(value, list | tuple):
        raise refused(name, value, "it must be a list")
    if len(value) > most:
        raise refused(name, f"{len(value)} entries", f"at most {most} are allowed")
    return list(value)
