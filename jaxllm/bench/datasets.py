"""The requests of a benchmark: prompts, and the length of each answer."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.bench.lengths import decided
from jaxllm.bench.options import DatasetOptions
from jaxllm.errors import ValidationError, not_utf8
from jaxllm.files import parse_json
from jaxllm.frontend.tokenizer import Tokenizer

# Conversations of ShareGPT outside of these limits are skipped, as in vLLM's benchmark.
_SHORTEST, _LONGEST_PROMPT, _LONGEST_BOTH = 4, 1024, 2048
# The number of attempts to give a random text its exact number of tokens.
_MENDINGS = 10


@dataclass(frozen=True, slots=True)
class BenchRequest:
    prompt: str
    prompt_len: int  # in tokens
    output_len: int


def make_requests(options: DatasetOptions, tokenizer: Tokenizer) -> list[BenchRequest]:
    """Make the requests that the options describe; the same options give the same requests."""
    options = decided(options)
    rng = np.random.default_rng(options.seed)
    match options.dataset_name:
        case "random":
            return _random(options, tokenizer, rng)
        case "prefix_repetition":
            return _prefix_repetition(options, tokenizer, rng)
        case "sharegpt":
            found = _shuffled(list(_sharegpt(options, tokenizer)), rng)
        case "custom":
            found = list(_custom(options, tokenizer))
    if not found:
        raise ValidationError(f"{options.dataset_path}: no request to make of it")
    # Repeat a short file.
    return [found[i % len(found)] for i in range(options.num_prompts)]


class RandomText:
    """Texts of a given number of tokens."""

    def __init__(self, tokenizer: Tokenizer, rng: np.random.Generator):
        self._tokenizer = tokenizer
        self._rng = rng
        special = set(tokenizer.hf.all_special_ids)
        # Exclude parts of characters, too: alone they are not text.
        self._ids = np.array(
            [
                i
                for i in range(len(tokenizer.hf))
                if i not in special and "\ufffd" not in tokenizer.decode([i])
            ]
        )

    def make(self, num_tokens: int, start: str = "") -> tuple[str, int]:
        """Return a text that begins with `start`, and its number of tokens. The number may be
        slightly wrong, because the tokenizer may split a text into other tokens than it was made
        of."""
        tokenizer = self._tokenizer
        ids = tokenizer.encode(start, add_special_tokens=False) if start else []
        text = ""
        for _ in range(_MENDINGS):
            ids = ids[:num_tokens]
            ids += self._rng.choice(self._ids, num_tokens - len(ids)).tolist()
            text = tokenizer.decode(ids)
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == num_tokens:
                break
        return text, len(ids)


def _random(
    options: DatasetOptions, tokenizer: Tokenizer, rng: np.random.Generator
) -> list[BenchRequest]:
    texts = RandomText(tokenizer, rng)
    prefix = texts.make(options.random_prefix_len)[0] if options.random_prefix_len else ""
    assert options.random_input_len and options.random_output_len, "decided"
    inputs = _lengths(options.random_input_len, options, rng) + options.random_prefix_len
    outputs = _lengths(options.random_output_len, options, rng)
    return [
        BenchRequest(*texts.make(int(num_input), prefix), int(num_output))
        for num_input, num_output in zip(inputs, outputs, strict=True)
    ]


def _lengths(mean: int, options: DatasetOptions, rng: np.random.Generator) -> np.ndarray:
    spread = int(mean * options.random_range_ratio)
    return rng.integers(max(mean - spread, 1), mean + spread, options.num_prompts, endpoint=True)


def _prefix_repetition(
    options: DatasetOptions, tokenizer: Tokenizer, rng: np.random.Generator
) -> list[BenchRequest]:
    texts = RandomText(tokenizer, rng)
    num_prefixes = options.prefix_repetition_num_prefixes
    prefix_len, suffix_len = (
        options.prefix_repetition_prefix_len,
        options.prefix_repetition_suffix_len,
    )
    output_len = options.prefix_repetition_output_len
    assert prefix_len and suffix_len and output_len, "decided"
    prefixes = [texts.make(prefix_len)[0] for _ in range(num_prefixes)]
    length = prefix_len + suffix_len
    requests = [
        BenchRequest(*texts.make(length, prefixes[i % num_prefixes]), output_len)
        for i in range(options.num_prompts)
    ]
    return _shuffled(requests, rng)


def _shuffled(requests: list[BenchRequest], rng: np.random.Generator) -> list[BenchRequest]:
    return [requests[i] for i in rng.permutation(len(requests))]


def _sharegpt(options: DatasetOptions, tokenizer: Tokenizer) -> Iterator[BenchRequest]:
    """Use the first two turns of each conversation: the question and the length of its answer."""
    path = str(options.dataset_path)
    try:
        conversations = [one["conversations"] for one in parse_json(_text_of(path))]
        pairs = [(c[0]["value"], c[1]["value"]) for c in conversations if len(c) >= 2]
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise TypeError("a value is no string")
    except (ValueError, TypeError, KeyError) as error:
        raise ValidationError(f"{path}: not a file of ShareGPT: {error!r}") from None
    for question, answer in pairs:
        prompt_len = len(tokenizer.encode(question))
        output_len = options.output_len or len(tokenizer.encode(answer))
        fits = min(prompt_len, output_len) >= _SHORTEST or options.output_len is not None
        if fits and prompt_len <= _LONGEST_PROMPT and prompt_len + output_len <= _LONGEST_BOTH:
            yield BenchRequest(question, prompt_len, output_len)


def _custom(options: DatasetOptions, tokenizer: Tokenizer) -> Iterator[BenchRequest]:
    path = str(options.dataset_path)
    for number, line in enumerate(_text_of(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record: dict[str, Any] = parse_json(line)
            prompt = record["prompt"]
            output_len = record.get("output_tokens", options.custom_output_len)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValidationError(
                f'{path}:{number}: not an object with "prompt": {error!r}'
            ) from None
        if not isinstance(prompt, str) or not isinstance(output_len, int) or output_len < 1:
            raise ValidationError(
                f'{path}:{number}: "prompt" must be a string and "output_tokens" a positive integer'
            )
        yield BenchRequest(prompt, len(tokenizer.encode(prompt)), options.output_len or output_len)


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from None
