"""The traffic: arrival times of requests, lengths of prompts and answers, and shared prefixes.

A trace is arrays, so that it can have a million requests. Prompts are made when requests arrive.
"""

import csv
import datetime
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ValidationError, refused
from jaxllm.files import parse_json
from jaxllm.messages import EngineRequest
from jaxllm.sampling_params import SamplingParams

# Tokens per id of a shared piece, in traces with such ids.
PIECE_TOKENS = 512
_PARAMS = SamplingParams()
# Token ids of shared pieces are below this number, those of a single request above.
_OWN_TOKENS = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests in the order of their arrival."""

    arrivals: np.ndarray  # float64 [n], seconds from the first
    num_prompt_tokens: np.ndarray  # int32 [n]
    num_output_tokens: np.ndarray  # int32 [n]
    # Ids of the pieces at the start of each prompt; equal ids have equal tokens. None: no sharing.
    pieces: Sequence[Sequence[int]] | None = None

    def __len__(self) -> int:
        return len(self.arrivals)

    def head(self, num_requests: int) -> "Trace":
        """The first requests of the trace."""
        return Trace(
            arrivals=self.arrivals[:num_requests],
            num_prompt_tokens=self.num_prompt_tokens[:num_requests],
            num_output_tokens=self.num_output_tokens[:num_requests],
            pieces=None if self.pieces is None else self.pieces[:num_requests],
        )

    def at_rate(self, requests_per_second: float) -> "Trace":
        """Scale the arrival times to this rate; keep the requests and their order."""
        span = self.arrivals[-1] if len(self) else 0.0
        if not span:
            raise ValidationError("all requests of the trace come at once; they have no rate")
        scale = len(self) / span / requests_per_second
        return Trace(
            arrivals=self.arrivals * scale,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            pieces=self.pieces,
        )

    def request(self, index: int, max_model_len: int) -> EngineRequest | None:
        """Make a request for the engine; None if its prompt leaves no room for an answer."""
        length = int(self.num_prompt_tokens[index])
        if length >= max_model_len:
            return None
        pieces = () if self.pieces is None else self.pieces[index]
        tokens = [token for piece in pieces for token in _tokens_of(piece)][:length]
        tokens += [_OWN_TOKENS + index % _OWN_TOKENS] * (length - len(tokens))
        return EngineRequest(
            request_id=str(index),
            prompt_token_ids=tokens,
            sampling_params=_PARAMS,
            max_tokens=min(int(self.num_output_tokens[index]), max_model_len - length),
            seed=0,
        )


def read_trace(path: Path) -> Trace:
    """Read JSON lines or CSV.

    A line of JSON has `timestamp` (milliseconds), `input_length` and `output_length`, and may have
    `hash_ids`, one for each 512 tokens of the prompt. A CSV has the columns TIMESTAMP (a date and
    time, or seconds), ContextTokens and GeneratedTokens.
    """
    rows = _csv_rows if path.suffix == ".csv" else _json_rows
    with path.open() as lines:
        try:
            found = sorted(rows(lines), key=lambda row: row[0])
            if not found:
                raise ValidationError(f"{path} has no requests")
            arrivals, prompts, outputs, pieces = zip(*found, strict=True)
            trace = Trace(
                arrivals=np.array(arrivals, float) - arrivals[0],
                num_prompt_tokens=np.array(prompts, np.int32),
                num_output_tokens=np.array(outputs, np.int32),
                pieces=pieces if any(pieces) else None,
            )
        except ValidationError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValidationError(f"{path}: {type(error).__name__} {error}") from error
    if not np.isfinite(trace.arrivals).all():
        raise ValidationError(f"{path}: times are finite numbers")
    if trace.num_prompt_tokens.min() < 1 or trace.num_output_tokens.min() < 1:
        raise ValidationError(f"{path}: prompts and answers have at least one token")
    return trace


def make_trace(
    num_requests: int,
    *,
    requests_per_second: float,
    burstiness: float,
    input_len: int,
    output_len: int,
    spread: float,
    num_prefixes: int,
    prefix_len: int,
    seed: int,
) -> Trace:
    """Random traffic.

    Arrivals have gamma-distributed gaps: burstiness 1 is a Poisson process, and lower values are
    burstier. Lengths are log-normal with the given means; `spread` is the deviation of the
    logarithm. Prompts begin with one of `num_prefixes` common prefixes, if there are any.
    """
    if num_prefixes and (prefix_len < 1 or prefix_len % PIECE_TOKENS):
        raise refused("prefix_len", prefix_len, f"it must be a multiple of {PIECE_TOKENS}")
    rng = np.random.default_rng(seed)
    if np.isfinite(requests_per_second):
        gaps = rng.gamma(burstiness, 1 / (requests_per_second * burstiness), num_requests)
        arrivals = np.cumsum(gaps) - gaps[0]
    else:
        arrivals = np.zeros(num_requests)

    def lengths(mean: int) -> np.ndarray:
        drawn = mean * rng.lognormal(-spread * spread / 2, spread, num_requests)
        return np.maximum(1, np.rint(drawn)).astype(np.int32)

    prompts, pieces = lengths(input_len), None
    if num_prefixes:
        num_pieces = prefix_len // PIECE_TOKENS
        prefixes = rng.integers(num_prefixes, size=num_requests)
        heads = [
            tuple(range(first, first + num_pieces))
            for first in range(0, num_prefixes * num_pieces, num_pieces)
        ]
        pieces = [heads[prefix] for prefix in prefixes]
        prompts += num_pieces * PIECE_TOKENS
    return Trace(
        arrivals=arrivals,
        num_prompt_tokens=prompts,
        num_output_tokens=lengths(output_len),
        pieces=pieces,
    )


def _tokens_of(piece: int) -> range:
    first = piece * PIECE_TOKENS % _OWN_TOKENS
    return range(first, first + PIECE_TOKENS)


def _json_rows(lines: Iterable[str]) -> Iterator[tuple[float, int, int, tuple[int, ...]]]:
    for line in lines:
        if line.strip():
            row = parse_json(line)
            yield (
                float(row["timestamp"]) / 1e3,
                int(row["input_length"]),
                int(row["output_length"]),
                tuple(map(int, row.get("hash_ids", ()))),
            )


def _csv_rows(lines: Iterable[str]) -> Iterator[tuple[float, int, int, tuple[int, ...]]]:
    for row in csv.DictReader(lines):
        prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        yield _seconds(row["TIMESTAMP"]), prompt, output, ()


def _seconds(text: Any) -> float:
    try:
        return float(text)
    except ValueError:
        # Some traces have seven fractional digits, one more than Python reads.
        whole, point, fraction = text.strip().partition(".")
        moment = datetime.datetime.fromisoformat(whole + point + fraction[:6])
        return moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp()
