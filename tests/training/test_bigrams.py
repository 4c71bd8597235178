"""First embeddings: what is counted is what the model says before its first step."""

import numpy as np
import pytest

from jaxllm.errors import ValidationError
from jaxllm.models.architecture import read_architecture
from jaxllm.training.bigrams import bigrams, fit_embeddings
from jaxllm.training.export import hf_config
from jaxllm.training.forward import RowModel
from jaxllm.training.options import ShapeOptions

VOCAB = 24
# Some tokens have one successor, others many; the last two never come.
TOKENS = np.random.default_rng(0).integers(0, 21, 3000).astype(np.uint16)
TOKENS[1::3] = TOKENS[0::3] // 2


def test_probabilities_of_what_follows():
    often, following = bigrams(TOKENS, VOCAB)
    assert often.sum() == len(TOKENS) - 1
    np.testing.assert_allclose(following.sum(1), 1, rtol=1e-5)
    seen = np.zeros((VOCAB, VOCAB))
    np.add.at(seen, (TOKENS[:-1].astype(int), TOKENS[1:].astype(int)), 1)
    # Seen pairs keep their order; unseen ones are possible.
    row = seen[3]
    assert np.argmax(following[3]) == np.argmax(row)
    assert (following > 0).all()
    # After a token that never came, everything is as likely as anywhere.
    anywhere = (seen.sum(0) + 1) / (seen.sum() + VOCAB)
    np.testing.assert_allclose(following[22], anywhere, rtol=1e-4)


def test_a_model_without_layers_says_the_bigrams():
    shape = ShapeOptions(
        hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1,
        head_size=16, max_model_len=64,
    )  # fmt: skip
    model = RowModel(read_architecture(hf_config(shape, VOCAB)))
    weights = model.initial_weights(0)
    embedding, head = fit_embeddings(TOKENS, VOCAB, 32, steps=150, seed=0)
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    logits = np.asarray(model.logits(weights, TOKENS[None, :64]))[0]
    said = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    wanted = bigrams(TOKENS, VOCAB)[1][TOKENS[:64]]
    distance = (wanted * np.log(wanted / said)).sum(1)
    assert distance.mean() < 0.01


def test_too_many_pairs_are_refused():
    with pytest.raises(ValidationError, match="bigram_steps=5: a vocabulary above 16384"):
        fit_embeddings(TOKENS, 20000, 8, steps=5, seed=0)
