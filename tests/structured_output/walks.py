"""Random answers of a grammar, token by token through its masks, with the bundled tokenizer."""

import functools
import json
import random
from types import SimpleNamespace

import numpy as np
from llguidance import LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from jaxllm import bundled
from jaxllm.config import ModelConfig
from jaxllm.structured_output.compile import compile_grammar
from jaxllm.structured_output.door import Door
from jaxllm.structured_output.options import StructuredOutputsConfig
from jaxllm.structured_output.params import StructuredOutputsParams
from jaxllm.structured_output.vocabulary import Vocabulary, load_vocabulary

ENDS = (0, 2)  # of the bundled tokenizer
_CLOSING = set(b']}",. >/)0')


@functools.cache
def vocabulary(*more: str) -> Vocabulary:
    """The bundled vocabulary, with these special tokens after its own."""
    path = bundled.path("bundled")
    if not more:
        info = SimpleNamespace(model_dir=str(path), vocab_size=4096, eos_token_ids=list(ENDS))
        return load_vocabulary(ModelConfig(), info)
    whole = json.loads((path / "tokenizer.json").read_text())
    whole["added_tokens"] += [
        whole["added_tokens"][0] | {"id": 4096 + place, "content": name}
        for place, name in enumerate(more)
    ]
    size = 4096 + len(more)
    return Vocabulary(LLTokenizer(json.dumps(whole), n_vocab=size, eos_token=list(ENDS)), size)


def door(*more: str, **config) -> Door:
    added = {name: 4096 + place for place, name in enumerate(more)}
    added |= {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    return Door(StructuredOutputsConfig(**config), vocabulary(*more), added)


def grammar(**params) -> str:
    return door().grammar(StructuredOutputsParams(**params))


_closing: dict[int, np.ndarray] = {}


def closes(vocab: Vocabulary) -> np.ndarray:
    """Which tokens close something."""
    if id(vocab) not in _closing:  # vocabularies are kept, too
        texts = (vocab.tokenizer.decode_bytes([token]) for token in range(vocab.size))
        _closing[id(vocab)] = np.array([set(text) <= _CLOSING for text in texts])
    return _closing[id(vocab)]


def walk(text: str, seed: int, vocab: Vocabulary | None = None, most: int = 400) -> str | None:
    """A random answer; None if it is not complete after so many tokens. Tokens that close things
    are favoured, more and more, so that most answers end."""
    vocab = vocab or vocabulary()
    matcher, rng = compile_grammar(vocab, text), random.Random(seed)
    words, answer = np.empty((1, vocab.num_words), np.int32), []
    for place in range(most):
        if matcher.is_stopped():
            break
        fill_next_token_bitmask(matcher, words)
        assert not matcher.is_error(), matcher.get_error()
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: vocab.size].astype(bool)
        assert bits.any(), f"nothing may follow {vocab.tokenizer.decode_str(answer)!r}"
        may_end, bits[list(ENDS)] = bits[list(ENDS)].any(), False
        if may_end and (rng.random() < 0.3 + place / most or not bits.any()):
            break
        closing = bits & closes(vocab)
        is_late = rng.random() < 0.5 + place / most
        allowed = np.flatnonzero(closing if closing.any() and is_late else bits)
        token = int(allowed[rng.randrange(len(allowed))])
        assert matcher.consume_token(token)
        answer.append(token)
    if not matcher.is_accepting():
        return None
    return vocab.tokenizer.decode_bytes(answer).decode()


def fits(text: str, answer: str, vocab: Vocabulary | None = None) -> bool:
    """Whether an answer is whole in the eyes of a grammar."""
    vocab = vocab or vocabulary()
    matcher = compile_grammar(vocab, text)
    tokens = vocab.tokenizer.tokenize_str(answer, parse_special=True)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
