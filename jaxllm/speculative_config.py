"""What a user can ask of speculative decoding, by vLLM's names, and what an engine makes of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import ValidationError, refused

# A row to verify has one token more, and the attention kernels take rows of up to eight as short.
MAX_DRAFTS = 7
_DEFAULT_DRAFTS = 4
# Shorter matches are mostly accidents. Longer ones are found as well: they end in a shorter one.
_DEFAULT_LOOKUP = (2, 4)
MAX_LOOKUP = 16

# vLLM's other methods, and what each would need.
_OTHER_METHODS = {
    "ngram_gpu": "'ngram' already searches on the device",
    "suffix": "'ngram' finds what prompt and answer repeat",
    "draft_model": "a second model is not run",
    "medusa": "heads beside the model's own are not run",
    "eagle": "heads beside the model's own are not run",
    "eagle3": "heads beside the model's own are not run",
    "mtp": "the layers of checkpoints for it are not run",
    "dflash": "a second model is not run",
    "dspark": "a second model is not run",
    "extract_hidden_states": "steps leave no hidden states",
    "custom_class": "classes of users do not draft",
}
_FIELDS = (
    "method",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "num_speculative_tokens_per_batch_size",
)
_OPTION = "speculative_config"


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How an engine drafts tokens ahead of the model."""

    method: str
    num_drafts: int  # the most of a row; programs have room for so many
    min_lookup: int  # the fewest last tokens that an earlier place must equal
    max_lookup: int
    # How many drafts rows get if so many requests run, from 1; more requests get none. The plan
    # fills it in if the user leaves it open.
    drafts_by_requests: tuple[int, ...] = ()

    @property
    def max_rows(self) -> int:
        """The most rows with drafts in a step."""
        return len(self.drafts_by_requests)


def read_speculation(
    options: Mapping[str, Any] | None, method: str | None, num_tokens: int | None
) -> Speculation | None:
    """Read `speculative_config`, and the flags that are short for its fields."""
    if options is None and method is None and num_tokens is None:
        return None
    fields = dict(options or {})
    for name, flag, value in (
        ("method", "spec_method", method),
        ("num_speculative_tokens", "spec_tokens", num_tokens),
    ):
        if value is not None and fields.setdefault(name, value) != value:
            raise refused(flag, value, f"{_OPTION} has {name}={fields[name]!r}; leave one out")
    method = fields.get("method")
    if method != "ngram":
        reason = _OTHER_METHODS.get(method) if isinstance(method, str) else None
        raise _refused("method", method, (f"{reason}; " if reason else "") + "there is 'ngram'")
    for name in fields:
        if name not in _FIELDS:
            raise _refused(name, fields[name], f"'ngram' has {', '.join(_FIELDS)}")
    num_drafts = _number(fields, "num_speculative_tokens", _DEFAULT_DRAFTS, MAX_DRAFTS)
    low, high = fields.get("prompt_lookup_min"), fields.get("prompt_lookup_max")
    default_low, default_high = _DEFAULT_LOOKUP
    if low is None and high is not None:
        default_low = min(default_low, _number(fields, "prompt_lookup_max", 1, MAX_LOOKUP))
    if high is None and low is not None:
        default_high = max(default_high, _number(fields, "prompt_lookup_min", 1, MAX_LOOKUP))
    low = _number(fields, "prompt_lookup_min", default_low, MAX_LOOKUP)
    high = _number(fields, "prompt_lookup_max", default_high, MAX_LOOKUP)
    if low > high:
        raise _refused("prompt_lookup_min", low, f"prompt_lookup_max={high} is less")
    return Speculation(
        method=method,
        num_drafts=num_drafts,
        min_lookup=low,
        max_lookup=high,
        drafts_by_requests=_by_requests(fields, num_drafts),
    )


def _by_requests(fields: Mapping[str, Any], num_drafts: int) -> tuple[int, ...]:
    """Read [[from, to, k], ...]: numbers of running requests, and the drafts of each row then."""
    name = "num_speculative_tokens_per_batch_size"
    ranges = fields.get(name)
    if ranges is None:
        return ()
    drafts: list[int] = []
    try:
        for first, last, k in ranges:
            if not all(type(x) is int for x in (first, last, k)):
                raise ValueError
            if first != len(drafts) + 1 or last < first or not 0 <= k <= num_drafts:
                raise ValueError
            if last > _MAX_REQUESTS:
                raise ValueError
            drafts += [k] * (last - first + 1)
    except (TypeError, ValueError):
        raise _refused(
            name,
            ranges,
            "give [[1, to, k], [to + 1, ...], ...]: ranges of numbers of requests without gaps, "
            f"and k from 0 to num_speculative_tokens={num_drafts}",
        ) from None
    while drafts and not drafts[-1]:
        drafts.pop()
    if not drafts:
        raise _refused(name, ranges, "no number of requests gets drafts")
    return tuple(drafts)


_MAX_REQUESTS = 1 << 16


def _number(fields: Mapping[str, Any], name: str, default: int, most: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= most:
        raise _refused(name, value, f"give 1 to {most}")
    return value


def _refused(name: str, value: object, why: str) -> ValidationError:
    return ValidationError(
        f"{_OPTION}: {name}={value!r} is not supported: {why}", parameter=_OPTION, value=value
    )
