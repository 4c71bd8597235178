"""How well a model predicts a text: bits per byte, which models with other tokenizers share."""

import math
from typing import NamedTuple

from jaxllm.llm import LLM
from jaxllm.sampling_params import SamplingParams


class Loss(NamedTuple):
    """What was measured."""

    bits_per_byte: float
    num_tokens: int


def measure_loss(llm: LLM, text: str, *, max_tokens: int = 256) -> Loss:
    """Let a model read a text in pieces of so many tokens. The first of each is not predicted."""
    tokenizer = llm.llm_engine.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = [ids[first : first + max_tokens] for first in range(0, len(ids), max_tokens)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    outputs = llm.generate(
        [{"prompt_token_ids": piece} for piece in pieces], params, use_tqdm=False
    )
    nats, num_bytes = 0.0, 0
    for piece, output in zip(pieces, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, position in zip(piece[1:], output.prompt_logprobs[1:], strict=True):
            assert position is not None
            nats -= position[token].logprob
        predicted = tokenizer.decode(
            piece[1:], skip_special_tokens=False, prompt_token_ids=piece[:1]
        )
        num_bytes += len(predicted.encode())
    if not num_bytes:
        raise ValueError("the text has no two tokens, of which one could be predicted")
    return Loss(nats / math.log(2) / num_bytes, sum(len(piece) - 1 for piece in pieces))
