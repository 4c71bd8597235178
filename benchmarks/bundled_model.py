"""How well a trained model predicts unseen text: bits per byte, beside other predictors.

    python benchmarks/bundled_model.py MODEL --data FOLDER ... [--exclude PATTERN ...]

The text is read and split as in `jaxllm train`, so data, exclude and heldout-share must be those of
the training run (the model card has them). The hashes in the model's manifest are checked. The
peers are `gzip -9` and `xz -9` on the concatenated held-out files, and a byte 5-gram model with
interpolated Kneser-Ney smoothing, counted on the model's training text. The model sees the held-out
text in independent windows of its context.

With --draft, it also reports how often a draft model agrees with the model on that text: in the
most likely token, and in the share that speculative sampling would accept (the overlap of
distributions).
"""

import argparse
import gzip
import json
import lzma
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.files import read_json
from jaxllm.models.architecture import read_architecture
from jaxllm.training.corpus import Document, read_corpus
from jaxllm.training.forward import RowModel
from jaxllm.training.objective import surprise
from jaxllm.training.tokenizer import load_tokenizer
from jaxllm.training.tokens import encode, heldout_rows
from jaxllm.weights.checkpoint import resolve_model_dir

_BATCH = 4  # rows
_ORDER = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--exclude", nargs="*", default=[])
    parser.add_argument("--heldout-share", type=float, default=0.05)
    parser.add_argument("--draft")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    folder = resolve_model_dir(args.model)
    documents = read_corpus(args.data, exclude=args.exclude, heldout_share=args.heldout_share)
    check_manifest(folder / "manifest.jsonl", documents)
    heldout = [d for d in documents if d.is_heldout]
    text = "".join(d.text for d in heldout).encode()
    results: dict[str, float | int] = {"heldout_files": len(heldout), "heldout_bytes": len(text)}
    kinds = {"python": [d for d in heldout if d.name.endswith(".py")]}
    kinds["prose"] = [d for d in heldout if d not in kinds["python"]]
    bits = {kind: model_bits(folder, some) for kind, some in kinds.items() if some}
    results["model"] = sum(bits.values()) / len(text)
    for kind, count in bits.items():
        results[f"model_{kind}"] = count / sum(d.num_bytes for d in kinds[kind])
    if args.draft is not None:
        results |= agreement(folder, resolve_model_dir(args.draft), heldout)
    if args.peers:
        results["gzip_9"] = 8 * len(gzip.compress(text, 9)) / len(text)
        results["xz_9"] = 8 * len(lzma.compress(text, preset=9)) / len(text)
        seen = "".join(d.text for d in documents if not d.is_heldout).encode()
        results["5_gram"] = NGramModel(seen, _ORDER).bits_per_byte(text)
    print(json.dumps({k: round(v, 4) for k, v in results.items()}, indent=1))


def check_manifest(path: Path, documents: Sequence[Document]) -> None:
    """Refuse text that differs from the training run's, or is in its training set."""
    known = {entry["name"]: entry for entry in map(json.loads, path.read_text().splitlines())}
    found = {d.name: d.manifest_entry() for d in documents}
    wrong = [n for n in known.keys() | found.keys() if known.get(n) != found.get(n)]
    if wrong:
        raise SystemExit(
            f"{len(wrong)} files differ from {path}, among them {sorted(wrong)[0]}; give the data, "
            "exclude and heldout-share of the training run"
        )


def model_bits(folder: Path, documents: Sequence[Document]) -> float:
    """The bits that the model needs for these texts, computed in float32."""
    model, weights = load(folder)

    @jax.jit
    def cost(rows: jax.Array) -> jax.Array:
        logits = model.logits(weights, jnp.maximum(rows[:, :-1], 0))
        return surprise(logits, rows[:, 1:]).sum()

    nats = sum(float(cost(batch)) for batch in batches(folder, documents))
    return nats / math.log(2)


def agreement(folder: Path, draft_folder: Path, documents: Sequence[Document]) -> dict[str, float]:
    """How often a draft agrees with the model, over the tokens of these texts."""
    model, weights = load(folder)
    draft, draft_weights = load(draft_folder)

    @jax.jit
    def agree(rows: jax.Array) -> jax.Array:
        is_real, inputs = rows[:, 1:] >= 0, jnp.maximum(rows[:, :-1], 0)
        theirs, ours = (
            jax.nn.softmax(one.logits(its, inputs))
            for one, its in ((model, weights), (draft, draft_weights))
        )
        same = theirs.argmax(-1) == ours.argmax(-1)
        overlap = jnp.minimum(theirs, ours).sum(-1)
        return jnp.array([jnp.sum(x * is_real) for x in (same, overlap, 1.0)])

    same, overlap, count = sum(np.asarray(agree(b)) for b in batches(folder, documents))
    return {
        "draft_same_token": float(same / count),
        "draft_accepted": float(overlap / count),
    }


def load(folder: Path) -> tuple[RowModel, dict[str, jax.Array]]:
    model = RowModel(read_architecture(read_json(folder / "config.json")))
    return model, model.load(folder)


def batches(folder: Path, documents: Sequence[Document]) -> Iterator[np.ndarray]:
    """Texts as batches of rows of the model's context; -1 is padding."""
    tokenizer = load_tokenizer(folder)
    tokens = np.concatenate(list(encode(tokenizer, (d.text for d in documents), special=False)))
    rows = heldout_rows(tokens, read_json(folder / "config.json")["max_position_embeddings"])
    rows = np.pad(rows, ((0, -len(rows) % _BATCH), (0, 0)), constant_values=-1)
    yield from np.split(rows, len(rows) // _BATCH)


class NGramModel:
    """Interpolated Kneser-Ney over bytes, with one discount for each order.

    The highest order counts occurrences. Lower orders count the different bytes before. The order
    of zero is the uniform distribution.
    """

    def __init__(self, text: bytes, order: int):
        self._order = order
        self._tables: dict[int, _Counts] = {}
        grams, counts = np.unique(_grams(text, order), return_counts=True)
        for n in range(order, 0, -1):
            self._tables[n] = _Counts(grams, counts)
            # Count the different bytes before each shorter gram.
            grams, counts = np.unique(grams & (256 ** (n - 1) - 1), return_counts=True)

    def bits_per_byte(self, text: bytes) -> float:
        """Of all bytes except the first ones, which lack a context."""
        found = _grams(text, self._order)
        probability = np.full(len(found), 1 / 256)
        for n in range(1, self._order + 1):
            probability = self._tables[n].refine(found & (256**n - 1), probability)
        return float(-np.log2(probability).mean())


class _Counts:
    """Counts of n-grams (numbers whose last byte is the newest), and of their contexts."""

    def __init__(self, grams: np.ndarray, counts: np.ndarray):
        self._grams, self._counts = grams, counts
        once, twice = (counts == 1).sum(), (counts == 2).sum()
        self._discount = once / (once + 2 * twice) if once else 0.5
        self._contexts, first = np.unique(grams >> 8, return_index=True)
        self._totals = np.add.reduceat(counts, first)
        self._kinds = np.diff(np.append(first, len(grams)))  # different bytes after a context

    def refine(self, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Probabilities of the newest bytes, given those from the next shorter context."""
        counts = _look_up(self._grams, self._counts, grams)
        totals = _look_up(self._contexts, self._totals, grams >> 8)
        kinds = _look_up(self._contexts, self._kinds, grams >> 8)
        seen = totals > 0
        totals = np.maximum(totals, 1)
        kept = np.maximum(counts - self._discount, 0) / totals
        return np.where(seen, kept + self._discount * kinds / totals * lower, lower)


def _grams(text: bytes, n: int) -> np.ndarray:
    """All n-grams of bytes, as numbers."""
    raw = np.frombuffer(text, np.uint8).astype(np.int64)
    length = len(raw) - n + 1
    total = np.zeros(length, np.int64)
    for i in range(n):
        total = (total << 8) | raw[i : i + length]
    return total


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Values of sorted keys; 0 for missing keys."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


if __name__ == "__main__":
    main()
