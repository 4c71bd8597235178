"""What a user can ask of speculative decoding, by vLLM's names, and what an engine makes of it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import ValidationError, refused

# A row to verify has one token more, and the attention kernels take rows of up to eight as short.
MAX_DRAFTS = 7
_DEFAULT_DRAFTS = 4
# Of a layer that was trained for one token more.
_DEFAULT_DRAFTS_OF_MTP = 1
# Shorter matches are mostly accidents. Of edited texts the longest of many tokens is right more
# often than that of a few (`benchmarks/lookups.py`).
_DEFAULT_LOOKUP = (2, 16)
MAX_LOOKUP = 16

# vLLM's other methods, and what each would need.
_OTHER_METHODS = {
    "ngram_gpu": "'ngram' already searches on the device",
    "suffix": "'ngram' finds what prompt and answer repeat",
    "medusa": "only heads of EAGLE's kinds and those of checkpoints are run",
    "dflash": "a model that drafts several tokens at once is not run",
    "dspark": "a model that drafts several tokens at once is not run",
    "extract_hidden_states": "steps leave no hidden states",
}
_OF_ALL = ("method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size")
_OF_HEAD = (*_OF_ALL, "model", "revision", "draft_tensor_parallel_size")
_FIELDS = {
    "ngram": (*_OF_ALL, "prompt_lookup_min", "prompt_lookup_max"),
    "draft_model": (*_OF_HEAD, "max_model_len"),
    "mtp": (*_OF_ALL, "draft_tensor_parallel_size"),
    "eagle": _OF_HEAD,
    "eagle3": _OF_HEAD,
    "custom_class": (*_OF_ALL, "model"),
}
# Those whose drafts are made by weights.
_WITH_WEIGHTS = ("draft_model", "mtp", "eagle", "eagle3")
# vLLM's other fields for a draft model: the values at which they change nothing, and what to say of
# any other.
_ABSENT_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "quantization": ((None,), "give a draft in float32, bfloat16 or float16"),
    "code_revision": ((None,), "no code of a model is run"),
    "draft_load_config": ((None,), "the draft is loaded as the model is"),
    "enforce_eager": ((None, False), "enforce_eager of the engine holds for the draft, too"),
    "parallel_drafting": ((None, False), "the draft makes one token after the other"),
    "use_heterogeneous_vocab": ((None, False), "the draft must have the model's vocabulary"),
    "disable_padded_drafter_batch": ((None, False), "shapes of steps are fixed"),
    "draft_sample_method": ((None,), "a draft is sampled as its request is, with the same noise"),
    "rejection_sample_method": (
        (None, "standard"),
        "a draft is accepted if it equals the model's own token",
    ),
}
_OPTION = "speculative_config"


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """A second model that drafts, as it is asked for."""

    model: str
    revision: str | None = None
    # The longest sequence that gets drafts. The plan fills it in if the user leaves it open.
    max_model_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class AskedHead:
    """A head that drafts, as it is asked for."""

    model: str | None = None  # where an EAGLE head is; None: in the model's own checkpoint
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How an engine drafts tokens ahead of the model."""

    method: str
    num_drafts: int  # the most of a row; programs have room for so many
    min_lookup: int = 0  # of 'ngram': the fewest last tokens that an earlier place must equal
    max_lookup: int = 0
    draft_model: DraftModel | None = None
    head: AskedHead | None = None
    drafter_class: str | None = None  # of 'custom_class': 'module:Class'
    # Of a draft model or a head: on how many devices it runs; None: on the model's.
    tensor_parallel_size: int | None = None
    # How many drafts rows get if so many requests run, from 1; more requests get none. The plan
    # fills it in if the user leaves it open.
    drafts_by_requests: tuple[int, ...] = ()
    # Whether the engine is on one host; the plan knows.
    is_on_one_host: bool = True

    def check(self, tensor_parallel_size: int, num_stages: int) -> None:
        """Refuse devices that it does not run on."""
        if num_stages > 1:
            why = "a pipeline does not speculate; leave one out"
            raise refused("pipeline_parallel_size", num_stages, why)
        if self.tensor_parallel_size not in (None, tensor_parallel_size):
            raise _refused(
                "draft_tensor_parallel_size",
                self.tensor_parallel_size,
                f"the draft is where the model is: tensor_parallel_size={tensor_parallel_size}",
            )

    @property
    def proposes(self) -> bool:
        """Whether a step ends with proposals for the next one, which may be none. Otherwise drafts
        are made for every row that is to have some."""
        return self.method not in _WITH_WEIGHTS

    @property
    def verifies_late(self) -> bool:
        """Whether rows with a grammar may have drafts, which a second program verifies: if the host
        can read them in time. What is proposed comes with the tokens of the step before, and other
        drafts come from a device of its own."""
        return self.proposes or self.is_on_one_host

    @property
    def max_rows(self) -> int:
        """The most rows with drafts in a step."""
        return len(self.drafts_by_requests)

    @property
    def most_drafts(self) -> tuple[int, int]:
        """The most rows with drafts in a step, and the most drafts of each."""
        return self.max_rows, self.num_drafts


def read_speculation(
    options: Mapping[str, Any] | None,
    method: str | None,
    num_tokens: int | None,
    model: str | None,
) -> Speculation | None:
    """Read `speculative_config`, and the flags that are short for its fields."""
    if options is None and method is None and num_tokens is None and model is None:
        return None
    fields = dict(options or {})
    for name, flag, value in (
        ("method", "spec_method", method),
        ("num_speculative_tokens", "spec_tokens", num_tokens),
        ("model", "spec_model", model),
    ):
        if value is not None and fields.setdefault(name, value) != value:
            raise refused(flag, value, f"{_OPTION} has {name}={fields[name]!r}; leave one out")
    method = fields.setdefault("method", "draft_model" if "model" in fields else None)
    if not isinstance(method, str) or method not in _FIELDS:
        reason = _OTHER_METHODS.get(method) if isinstance(method, str) else None
        if isinstance(method, str) and method.endswith("_mtp"):
            reason = "write 'mtp', whatever the model"
        *most, last = map(repr, _FIELDS)
        methods = f"{', '.join(most)} and {last}"
        raise _refused("method", method, (f"{reason}; " if reason else "") + f"there are {methods}")
    for name, value in fields.items():
        if name in _FIELDS[method]:
            continue
        neutral, reason = _ABSENT_FIELDS.get(name, ((), ""))
        if method not in _WITH_WEIGHTS or not reason:
            raise _refused(name, value, f"{method!r} has {', '.join(_FIELDS[method])}")
        if value not in neutral:
            raise _refused(name, value, reason)
    default = _DEFAULT_DRAFTS_OF_MTP if method == "mtp" else _DEFAULT_DRAFTS
    num_drafts = _number(fields, "num_speculative_tokens", default, MAX_DRAFTS)
    low, high = _lookup(fields) if method == "ngram" else (0, 0)
    return Speculation(
        method=method,
        num_drafts=num_drafts,
        min_lookup=low,
        max_lookup=high,
        draft_model=_draft_model(fields) if method == "draft_model" else None,
        head=_head(method, fields),
        drafter_class=_drafter_class(fields) if method == "custom_class" else None,
        tensor_parallel_size=fields.get("draft_tensor_parallel_size"),
        drafts_by_requests=_by_requests(fields, num_drafts),
    )


def _lookup(fields: Mapping[str, Any]) -> tuple[int, int]:
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
    return low, high


def _draft_model(fields: Mapping[str, Any]) -> DraftModel:
    model, revision = _checkpoint(fields, "'draft_model' needs the directory or name of a model")
    longest = fields.get("max_model_len")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise _refused("max_model_len", longest, "give at least 1")
    return DraftModel(model=model, revision=revision, max_model_len=longest)


def _head(method: str, fields: Mapping[str, Any]) -> AskedHead | None:
    if method == "mtp":
        return AskedHead()
    if method not in ("eagle", "eagle3"):
        return None
    model, revision = _checkpoint(fields, f"{method!r} needs the directory or name of a head")
    return AskedHead(model=model, revision=revision)


def _checkpoint(fields: Mapping[str, Any], what: str) -> tuple[str, str | None]:
    """A model's directory or name, and its revision."""
    model, revision = fields.get("model"), fields.get("revision")
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if not isinstance(model, str) or not model:
        raise _refused("model", model, what)
    if revision is not None and not isinstance(revision, str):
        raise _refused("revision", revision, "give a name")
    return model, revision


def _drafter_class(fields: Mapping[str, Any]) -> str:
    name = fields.get("model")
    if not isinstance(name, str) or not all(name.partition(":")[::2]):
        raise _refused("model", name, "'custom_class' needs a drafter as 'module:Class'")
    return name


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
