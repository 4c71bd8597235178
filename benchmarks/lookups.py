"""Tokens per step of drafters that look text up, by counting: no engine runs, and no time counts.

    python benchmarks/lookups.py

Each answer is known. At every step a drafter sees the text so far, and drafts; the step brings the
drafts that are right, and one token more. So the figures are those of requests whose model says
just this, at any temperature.

- ngram 4, ngram 16: what followed the latest place with the most equal last tokens, 2 to so many,
  in prompt or answer (`jaxllm/speculation/ngram.py`).
- suffix: as suffix decoding drafts (arXiv 2411.04975): of all places with the same last tokens, up
  to 24 of them, what followed most often, as long as it is likely and not longer than the match.
  It looks in prompt and answer, and, `+ others`, in the answers of the requests before.

The texts are sources of jaxllm in the tokens of the bundled model: the rest of a file behind its
first 256 tokens, and a part of a file, which is the prompt, with a tenth of its lines replaced.
`edited again` edits each part four times, each time with other lines.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from speculation import LONGEST, edit
from tokenizers import Tokenizer

import jaxllm
from jaxllm import bundled

_DEEPEST = 24
_LEAST_LIKELY = 0.1

Drafter = Callable[[np.ndarray, int], Sequence[int]]


class Request(NamedTuple):
    prompt: list[int]
    answer: list[int]


def ngram(deepest: int) -> Drafter:
    def draft(text: np.ndarray, k: int) -> Sequence[int]:
        found = matches(text, text, deepest)
        if len(found) < 2:
            return ()
        place = int(found[-1][-1])
        period = len(text) - place
        return [int(text[place + i % period]) for i in range(k)]

    return draft


def suffix(corpora: Sequence[np.ndarray]) -> Drafter:
    def draft(text: np.ndarray, k: int) -> Sequence[int]:
        best: tuple[float, list[int]] = (0.0, [])
        for corpus in (text, *corpora):
            for depth, places in enumerate(matches(corpus, text, deepest=_DEEPEST), 1):
                best = max(best, likely(corpus, places, min(k, depth)))
        return best[1]

    return draft


def matches(corpus: np.ndarray, text: np.ndarray, deepest: int) -> list[np.ndarray]:
    """The places of a corpus behind the last 1, 2, ... tokens of a text, while there are any."""
    found = []
    places = np.arange(1, len(corpus))
    for depth in range(1, min(deepest, len(text)) + 1):
        places = places[places >= depth]
        places = places[corpus[places - depth] == text[-depth]]
        if not places.size:
            break
        found.append(places)
    return found


def likely(corpus: np.ndarray, places: np.ndarray, most: int) -> tuple[float, list[int]]:
    """What follows most often at places, and how many of these tokens can be expected."""
    draft: list[int] = []
    probability, expected = 1.0, 0.0
    while len(draft) < most:
        places = places[places < len(corpus)]
        tokens = corpus[places]
        if not tokens.size:
            break
        values, counts = np.unique(tokens, return_counts=True)
        probability *= counts.max() / len(tokens)
        if probability < _LEAST_LIKELY:
            break
        expected += probability
        token = values[counts.argmax()]
        draft.append(int(token))
        places = places[tokens == token] + 1
    return expected, draft


def count(request: Request, draft: Drafter, k: int) -> tuple[int, int, int]:
    """The steps that an answer takes, and how many tokens are drafted and accepted in them."""
    text = np.array(request.prompt + request.answer)
    place, steps, drafted, accepted = len(request.prompt) + 1, 1, 0, 0
    while place < len(text):
        tokens = list(draft(text[:place], k))[: len(text) - place - 1]
        right = 0
        while right < len(tokens) and tokens[right] == text[place + right]:
            right += 1
        place, steps = place + right + 1, steps + 1
        drafted, accepted = drafted + len(tokens), accepted + right
    return steps, drafted, accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 7])
    parser.add_argument("--texts", type=int, default=24)
    args = parser.parse_args()
    directory = bundled.path("bundled")
    assert directory is not None
    tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    for name, requests in kinds(tokenizer, args.texts).items():
        for k in args.drafts:
            figures = []
            for drafter in ("ngram 4", "ngram 16", "suffix", "suffix + others"):
                past: list[np.ndarray] = []
                total = np.zeros(3, int)
                for request in requests:
                    its = suffix(past)
                    if drafter.startswith("ngram"):
                        its = ngram(int(drafter.split()[1]))
                    total += count(request, its, k)
                    if drafter == "suffix + others":
                        past = [np.concatenate([*past, [-1], request.answer])]
                steps, drafted, accepted = total
                tokens = sum(len(request.answer) for request in requests)
                figures.append(f"{drafter} {tokens / steps:.2f} ({accepted / drafted:.2f})")
            print(f"{name}, k={k}: " + ", ".join(figures), flush=True)


def kinds(tokenizer: Tokenizer, num_texts: int) -> dict[str, list[Request]]:
    encode = Encode(tokenizer)
    files = sorted(Path(jaxllm.__file__).parent.rglob("*.py"))
    texts = [encode.encode(path.read_text()) for path in files]
    written = [
        Request(its[:256], its[256 : 256 + LONGEST]) for its in texts if len(its) >= 256 + LONGEST
    ]
    rng = random.Random(0)
    chosen = [path for path, its in zip(files, texts, strict=True) if len(its) >= 600]

    def edited(path: Path) -> Request:
        before, after = edit(path.read_text(), texts, encode, rng)
        return Request(before, after[:LONGEST])

    return {
        "written": written[:num_texts],
        "edited": [edited(path) for path in chosen[:num_texts]],
        "edited again": [edited(path) for path in chosen[: num_texts // 4] for _ in range(4)],
    }


class Encode:
    """A tokenizer with the calls of a model's."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)


if __name__ == "__main__":
    main()
