"""Prompts that are too long for a model: refused or cut, and hardly tokenized."""

import pytest

from jaxllm.errors import ValidationError
from jaxllm.frontend import tokenizer
from jaxllm.frontend.input_processor import InputProcessor
from jaxllm.frontend.prompt_length import PromptLength
from jaxllm.frontend.tokenizer import render_chat
from jaxllm.sampling_params import SamplingParams

WORDS = "hello world, hello you. " * 20_000


@pytest.fixture
def num_chars(monkeypatch):
    """Of each text that is tokenized."""
    found, encode = [], tokenizer._encode

    def counted(hf, text, add_special_tokens):
        found.append(len(text))
        return encode(hf, text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "_encode", counted)
    return found


@pytest.fixture(params=["byte_level", "byte_fallback", "metaspace", "python_bytes"])
def processor(request, config, info):
    return InputProcessor(config, info, request.getfixturevalue(request.param))


def test_a_prompt_that_cannot_fit_is_refused_with_its_least_length(processor, num_chars):
    message = "has at least [0-9]+ tokens, but with max_model_len=64, the maximum context length"
    with pytest.raises(ValidationError, match=message) as caught:
        processor.process("a", WORDS, SamplingParams())
    assert caught.value.parameter == "prompt"
    assert sum(num_chars) <= 1 << 16


def test_a_prompt_that_almost_fits_is_refused_with_its_length(byte_level):
    length = PromptLength(64)
    assert len(length.encode(byte_level, "a" * 63)) == 63
    with pytest.raises(ValidationError, match="has 64 tokens.* at most 63"):
        length.encode(byte_level, "a" * 64)


@pytest.mark.parametrize("truncate", [1, 10, 63, -1])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_of_a_prompt_that_is_cut_the_end_is_read(kind, truncate, config, info, num_chars, request):
    of_kind = request.getfixturevalue(kind)
    whole = of_kind.encode(WORDS)
    num_chars.clear()
    processor = InputProcessor(config, info, of_kind)
    found = processor.process("a", WORDS, SamplingParams(), truncate_prompt_tokens=truncate)
    assert found.prompt_token_ids == whole[-(63 if truncate == -1 else truncate) :]
    assert sum(num_chars) < 80_000


@pytest.mark.parametrize("kind", ["metaspace", "python_bytes"])
def test_where_the_end_cannot_be_told_a_long_prompt_is_refused(
    kind, config, info, num_chars, request
):
    processor = InputProcessor(config, info, request.getfixturevalue(kind))
    with pytest.raises(ValidationError, match="480000 characters, of which no more than 262144"):
        processor.process("a", WORDS, SamplingParams(), truncate_prompt_tokens=10)
    assert not num_chars
    short = WORDS[:100_000]  # all of it is read
    found = processor.process("a", short, SamplingParams(), truncate_prompt_tokens=10)
    assert found.prompt_token_ids == processor._tokenizer.encode(short)[-10:]


def test_a_conversation_that_cannot_fit_is_refused(byte_level, num_chars):
    messages = [{"role": "user", "content": WORDS}]
    with pytest.raises(ValidationError, match="maximum context length"):
        render_chat(byte_level, messages, length=PromptLength(64))
    assert not num_chars
    ids = render_chat(byte_level, messages, length=PromptLength(64, 10))["prompt_token_ids"]
    assert ids == render_chat(byte_level, messages)["prompt_token_ids"][-10:]
