"""A request's form becomes the grammar of its EngineRequest."""

import pytest

from jaxllm import LLM, SamplingParams, ValidationError
from jaxllm.config import EngineConfig
from jaxllm.frontend.input_processor import InputProcessor
from jaxllm.frontend.tokenizer import load_tokenizer
from jaxllm.messages import EngineInfo
from jaxllm.parsers.reasoning.base import Reasoning
from jaxllm.parsers.reasoning.registry import REASONING_FORMATS
from jaxllm.testing import make_tiny_checkpoint
from tests.stand_in import INFO

FORM = {"structured_outputs": {"regex": "[0-9]+"}}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def processor_of(model_dir):
    """A function that makes an input processor with these options."""

    def make(**options):
        config = EngineConfig.create(model_dir, **options)
        fields = {name: getattr(INFO, name) for name in INFO.__struct_fields__}
        fields |= {"model_dir": model_dir, "vocab_size": 384}
        has_none = config.model.skip_tokenizer_init
        tokenizer = None if has_none else load_tokenizer(config.model, model_dir)
        return InputProcessor(config, EngineInfo(**fields), tokenizer)

    return make


@pytest.fixture(scope="module")
def processor(processor_of):
    return processor_of()


def grammar(processor, prompt="hi", reasoning=None, **params):
    params = SamplingParams(**(params or FORM))
    done = processor.process("r", prompt, params, reasoning=reasoning)
    assert done.params.structured_outputs is None  # the engine reads the grammar alone
    return {request.grammar for request in done.requests}


def test_all_answers_of_a_request_have_its_grammar(processor):
    assert grammar(processor, temperature=1) == {None}
    (form,) = grammar(processor, n=3, **FORM)
    assert "[0-9]+" in form


def test_the_prompt_says_where_the_form_begins(processor):
    reasoning = Reasoning(REASONING_FORMATS["qwen3"], True)
    forms = [
        grammar(processor, prompt, reasoning).pop()
        for prompt in ("hi", "hi <think>\n", "hi <think></think>\n\n")
    ]
    assert len(set(forms)) == 3
    assert forms[2].count("[0-9]+") == 1 and "think" not in forms[2]
    # A prompt of ids is read, too.
    ids = processor.process("r", "hi <think>\n", SamplingParams()).prompt_token_ids
    assert grammar(processor, ids, reasoning) == {forms[1]}


def test_the_option_names_the_reasoning_that_no_server_parses(processor_of, processor):
    named = processor_of(structured_outputs_config={"reasoning_parser": "qwen3"})
    reasoning = Reasoning(REASONING_FORMATS["qwen3"])
    assert grammar(named) == grammar(processor, reasoning=reasoning) != grammar(processor)


def test_a_form_needs_a_tokenizer(processor_of):
    without = processor_of(skip_tokenizer_init=True)
    with pytest.raises(ValidationError, match="structured_outputs=.*skip_tokenizer_init"):
        grammar(without, [1, 2])


def test_a_wrong_option_is_refused_before_the_model_is_loaded():
    with pytest.raises(ValidationError, match="structured_outputs_config.backend='outlines'"):
        LLM("no-model", structured_outputs_config={"backend": "outlines"})
    with pytest.raises(ValidationError, match="structured-outputs-config"):
        LLM("no-model", guided_decoding_backend="xgrammar")
