"""Forms are tried before a request is taken, each once."""

import threading

import pytest

from jaxllm import StructuredOutputsParams, ValidationError
from jaxllm.structured_output import door as door_module
from tests.structured_output.walks import door


def test_equal_forms_are_compiled_once(monkeypatch):
    compiled = []
    compile_grammar = door_module.compile_grammar

    def counted(vocabulary, text):
        compiled.append(text)
        return compile_grammar(vocabulary, text)

    monkeypatch.setattr(door_module, "compile_grammar", counted)
    one = door()
    for _ in range(3):
        one.grammar(StructuredOutputsParams(regex="a+"))
        with pytest.raises(ValidationError, match=r"structured_outputs.json: Unimplemented.*not"):
            one.grammar(StructuredOutputsParams(json={"not": {}}))
    assert len(compiled) == len(set(compiled)) == 2


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(door_module, "MAX_KNOWN", 3)
    one = door()
    for text in "abcdef":
        one.grammar(StructuredOutputsParams(choice=[text]))
    assert len(one._known._outcomes) == 3


def test_threads_share_a_door():
    one, forms = door(), []
    threads = [
        threading.Thread(
            target=lambda: forms.append(one.grammar(StructuredOutputsParams(regex="[ab]{3}")))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(forms) == 4 and len(set(forms)) == 1


@pytest.mark.parametrize("given", [["yes", "no", "yes"], ["a", "ab", "abc"], ['"', "\\", "\n\x7f"]])
def test_choices(given):
    from tests.structured_output.walks import fits, grammar, walk

    form = grammar(choice=given)
    assert all(fits(form, one) for one in given)
    assert not fits(form, given[0] + given[0])
    assert {walk(form, seed) for seed in range(4)} <= set(given)


def test_options_of_the_engine_are_defaults():
    from tests.structured_output.walks import fits

    one = door(disable_any_whitespace=True, disable_additional_properties=True)
    schema = {"type": "object", "properties": {"a": {}}}
    form = one.grammar(StructuredOutputsParams(json=schema))
    assert fits(form, '{"a":1}') and not fits(form, '{"a": 1}') and not fits(form, '{"b":1}')
    own = one.grammar(StructuredOutputsParams(json=schema, whitespace_pattern=" "))
    assert fits(own, '{"a": 1}')
