"""Reads what requests of every kind have: a prompt, a priority, a time of arrival."""

import math
import numbers
import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from jaxllm.config import EngineConfig
from jaxllm.errors import refused
from jaxllm.frontend.tokenizer import Tokenizer
from jaxllm.messages import EngineInfo
from jaxllm.prompts import PromptType
from jaxllm.sampling_params import Limits, check_is_text


class Length(Protocol):
    """The rule for the length of a prompt."""

    def encode(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Return the ids of a text, truncated if wanted; raise ValidationError."""
        ...

    def fit(self, token_ids: list[int]) -> list[int]:
        """Likewise for a prompt of ids."""
        ...


class PromptReader:
    """Validates prompts for one engine."""

    def __init__(self, config: EngineConfig, info: EngineInfo, tokenizer: Tokenizer | None):
        self._info = info
        self._tokenizer = tokenizer
        self._policy = config.scheduler.scheduling_policy

    def check_request(
        self,
        request_id: str,
        priority: int,
        arrival_time: float | None,
        trace_headers: Mapping[str, str] | None,
    ) -> tuple[int, float]:
        """Check what requests of every kind have; return the priority and the time of arrival."""
        if not isinstance(request_id, str) or not request_id:
            raise refused("request_id", request_id, "it must be a non-empty string")
        priority = self._checked_priority(priority)
        if arrival_time is None:
            arrival_time = time.time()
        elif not isinstance(arrival_time, numbers.Real) or not math.isfinite(arrival_time):
            raise refused("arrival_time", arrival_time, "it must be a number, as of time.time()")
        _check_trace_headers(trace_headers)
        return priority, float(arrival_time)

    def _checked_priority(self, priority: object) -> int:
        if isinstance(priority, bool) or not isinstance(priority, numbers.Integral):
            raise refused("priority", priority, "it must be an integer")
        if not -(2**63) <= int(priority) < 2**63:
            raise refused("priority", priority, "it must fit in 64 bits")
        if priority and self._policy == "fcfs":
            raise refused(
                "priority",
                priority,
                "the engine serves first come, first served; start it with "
                "scheduling_policy='priority'",
            )
        return int(priority)

    def read(
        self, prompt: PromptType, length: Length, *, may_be_empty: bool
    ) -> tuple[str | None, list[int], str | None]:
        """Return text, token ids and cache salt of a prompt of any kind, truncated if wanted. Of an
        empty text, if there may be one, the ids are those after which a document begins."""
        salt: str | None = None
        given: Any = prompt
        text: Any = None
        if isinstance(prompt, Mapping):
            unknown = prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown:
                raise refused(
                    "prompt",
                    sorted(map(str, unknown)),
                    "these keys are not supported; use 'prompt' or 'prompt_token_ids', and "
                    "'cache_salt'",
                )
            text = prompt.get("prompt")
            given = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else text
            salt = prompt.get("cache_salt")
            if salt is not None:
                _check_salt(salt)
        if isinstance(given, str):
            if self._tokenizer is None:
                raise refused(
                    "prompt",
                    given,
                    "there is no tokenizer (skip_tokenizer_init=True); pass prompt_token_ids",
                )
            check_is_text("prompt", given)
            text, token_ids = given, length.encode(self._tokenizer, given)
            if may_be_empty and not given:
                token_ids = list(self._tokenizer.start_of_document)
        elif isinstance(given, list | tuple):
            token_ids = length.fit(_integers("prompt_token_ids", given))
        else:
            raise refused(
                "prompt",
                given,
                "it must be a string, a list of token ids, or a dict with 'prompt' or "
                "'prompt_token_ids'",
            )
        if text is not None and not isinstance(text, str):
            raise refused("prompt", text, "it must be a string")
        if not token_ids:
            empty = given if text is None else text
            raise refused("prompt", empty, "it is empty; give at least one token")
        self.check_in_vocabulary("prompt_token_ids", token_ids)
        return text, token_ids, salt

    def check_in_vocabulary(self, name: str, token_ids: Iterable[int]) -> None:
        worst = max(token_ids, default=0)
        if worst >= self._info.vocab_size:
            raise refused(
                name,
                worst,
                f"no such token; ids of this model are below {self._info.vocab_size}",
            )


def _integers(name: str, values: Sequence[Any]) -> list[int]:
    """Copy a list of ids; turn numpy's integers into Python's."""
    if set(map(type, values)) <= {int}:  # the common case, which runs in C
        token_ids = list(values)
    else:
        try:
            token_ids = [operator.index(value) for value in values]
        except TypeError:
            bad = next(value for value in values if not hasattr(value, "__index__"))
            raise refused(name, bad, "token ids must be integers") from None
        if any(isinstance(value, bool) for value in values):
            raise refused(name, values, "token ids must be integers, not booleans")
    if token_ids and min(token_ids) < 0:
        raise refused(name, min(token_ids), "token ids must not be negative")
    return token_ids


def _check_salt(salt: object) -> None:
    if not isinstance(salt, str) or not salt:
        raise refused("cache_salt", salt, "it must be a non-empty string")
    check_is_text("cache_salt", salt)
    if len(salt) > Limits.MAX_SALT_CHARS:
        raise refused("cache_salt", salt, f"at most {Limits.MAX_SALT_CHARS} characters")
    if any(char in salt for char in "@/\\\0"):
        raise refused("cache_salt", salt, "it must not contain '@', '/', '\\' or NUL")


def _check_trace_headers(headers: object) -> None:
    if headers is not None and not (
        isinstance(headers, Mapping)
        and all(isinstance(text, str) for item in headers.items() for text in item)
    ):
        raise refused("trace_headers", headers, "it must be a dict of strings, or None")
