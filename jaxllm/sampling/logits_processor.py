"""Logits processors of users: classes that are traced into the sampler of every step.

A processor has two halves. On the host, `encode` turns a request's `extra_args` into a few numbers,
or refuses them. It runs when a request is validated and again when the request gets a slot. On the
device, `apply` is traced into the step and changes the logits of several rows at once, of which
none may depend on another. This module does not import jax, so that processes without jax can load
processors, too.
"""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.config import EngineConfig
from jaxllm.errors import refused
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import jax

# Each processor has a bit in the flags of a row (jaxllm.sampling.row_params).
MAX_LOGITS_PROCESSORS = 8
_LARGEST_FLOAT32 = 3.4028234663852886e38


class LogitsProcessor:
    """Base class of users' logits processors.

    The engine makes an instance, `cls(config)`, when it starts. It must keep no state between
    calls: `encode` runs in more than one process, `apply` only while a step is traced.
    """

    # The number of float32 values that a request passes to `apply`.
    num_params: int = 0

    def __init__(self, config: EngineConfig):
        self.config = config

    def encode(self, params: SamplingParams) -> Sequence[float] | None:
        """Return the request's `num_params` numbers from `params.extra_args`; None if the request
        does not use this processor. Raise ValueError to refuse the request."""
        raise NotImplementedError

    def apply(
        self, logits: "jax.Array", params: "jax.Array", output_index: "jax.Array"
    ) -> "jax.Array":
        """Return changed logits, f32 [R, V].

        `params` is f32 [R, num_params]. `output_index` i32 [R] counts the output tokens before the
        one to be sampled. Rows that do not use this processor have zeros in `params`, and their
        results are ignored.
        """
        raise NotImplementedError


def load_logits_processors(
    specs: Sequence[type | str], config: EngineConfig
) -> tuple[LogitsProcessor, ...]:
    """Make the processors that `EngineConfig` names as classes or as 'module:Class'."""
    if len(specs) > MAX_LOGITS_PROCESSORS:
        raise refused(
            "logits_processors", len(specs), f"at most {MAX_LOGITS_PROCESSORS} can be loaded"
        )
    return tuple(_find_class(spec)(config) for spec in specs)


def encode_request(
    processors: Sequence[LogitsProcessor], params: SamplingParams
) -> list[tuple[float, ...] | None]:
    """Encode a request with each processor; raise ValueError when one refuses it."""
    encoded: list[tuple[float, ...] | None] = []
    for processor in processors:
        try:
            values = processor.encode(params)
        except Exception as error:  # a user's code may raise anything
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"{type(processor).__name__}.encode: {kind}{error}") from error
        encoded.append(None if values is None else _finite_numbers(processor, values))
    return encoded


def _finite_numbers(processor: LogitsProcessor, values: Sequence[float]) -> tuple[float, ...]:
    name = type(processor).__name__
    try:
        encoded = tuple(map(float, values))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}.encode must return numbers: {error}") from error
    if len(encoded) != processor.num_params:
        raise ValueError(
            f"{name}.encode returned {len(encoded)} numbers; its num_params is "
            f"{processor.num_params}"
        )
    if not all(abs(number) <= _LARGEST_FLOAT32 for number in encoded):  # NaN fails, too
        raise ValueError(f"{name}.encode returned {encoded}; float32 numbers must be finite")
    return encoded


def _find_class(spec: type | str) -> type[LogitsProcessor]:
    found: Any = spec
    if isinstance(spec, str):
        module, _, name = spec.partition(":")
        if not module or not name:
            raise refused("logits_processors", spec, "write it as 'module:Class'")
        try:
            found = getattr(importlib.import_module(module), name)
        except Exception as error:  # importing a user's code may raise anything
            raise refused("logits_processors", spec, f"it cannot be imported ({error})") from error
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        raise refused("logits_processors", spec, "it must be a subclass of jaxllm.LogitsProcessor")
    return found
