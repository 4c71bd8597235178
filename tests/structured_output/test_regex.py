"""Regexes mean what Python's `re.fullmatch` means, or are refused."""

import re

import pytest

from jaxllm import ValidationError
from jaxllm.structured_output.regex import to_rust
from tests.structured_output.walks import fits, grammar, walk

FOLLOWED = [
    r"\d{3}-\d{4}",
    r"^\d+$",
    r"^(yes|no)$",
    r"^a|b$",
    r"\Aab?\Z",
    r"(^a|^b)c",
    r"(x(y|z$))",
    r"[^\W\d_]{2}",
    r"\W\D\S",
    r"[\w.-]{1,4}@[a-z]{1,4}\.(com|org)",
    r"a+?b*?c??",
    r'{"name": "[a-z]+"}',
    r"a{2}{1,2}"[:4],
    r"a{,3}b",
    r"x{1,2}?",
    r"[[]a]",
    r"[]a]{2}",
    r"[a&&b~~c]{3}",
    r"[+--]",
    r"a/b\/c",
    r"(?i:ja|nein)",
    r"(?P<year>20\d\d)-(?:0[1-9])",
    r"\x41B[\x20-\x22]",
    r"é+ü?",
    r"日本語?",
    r"a\.b\*c\\d\-e\"\'\ f",
    r".{3}",
    r"\t\n\[\]\{\}",
    r"[\s]x\sy",
    r"[^a-y\n]",
    r"()a",
]
REFUSED = {
    r"(?=a)b": "look-ahead",
    r"a(?!b)": "look-ahead",
    r"(?<=a)b": "look-behind",
    r"(?<!a)b": "look-behind",
    r"(a)\1": "refers to a group",
    r"(?P<a>a)(?P=a)": "a reference",
    r"(?>a)": "atomic",
    r"\bword\b": "the border of a word",
    r"a^b": "in the middle",
    r"a$b": "in the middle",
    r"(a$|b)c": "in the middle",
    r"(^a)+": "repeats",
    r"a++b": "possessive",
    r"(?m)^a$": "several lines",
    r"*a": "repeats nothing",
    r"(a": "not closed",
    r"a)": "not open",
    r"[a": "not closed",
    "a\\": "backslash",
    r"\q": "unrecognized escape",
    r"[b-a]": "invalid character class range",
}


@pytest.mark.filterwarnings("ignore:Possible")
@pytest.mark.parametrize("pattern", FOLLOWED)
def test_every_answer_matches_the_whole_pattern(pattern):
    form = grammar(regex=pattern)
    answers = [answer for seed in range(6) if (answer := walk(form, seed, most=60)) is not None]
    assert answers
    for answer in answers:
        assert re.fullmatch(pattern, answer), answer


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_cannot_be_followed_is_refused(pattern):
    with pytest.raises(ValidationError, match=REFUSED[pattern]) as caught:
        grammar(regex=pattern)
    assert caught.value.parameter == "structured_outputs.regex"


@pytest.mark.parametrize(
    ("pattern", "answers", "others"),
    [
        (r"^a|b$", ["a", "b"], ["ab", "ax", "xb"]),
        (r"a{,2}", ["", "a", "aa"], ["aaa", "a{,2}"]),
        (r"\w", ["a", "_", "9"], ["é", " "]),
        (r"[[]a]", ["[a]"], ["a", "["]),
        (r"a+?", ["a", "aa"], [""]),
        (r"a$", ["a"], ["a\n", "ab"]),
    ],
)
def test_some_patterns_in_full(pattern, answers, others):
    form = grammar(regex=pattern)
    assert all(fits(form, answer) for answer in answers)
    assert not any(fits(form, other) for other in others)


@pytest.mark.parametrize(
    "pattern",
    [r"(a+)+b", r"(.*a){30}", r"(a|b)*a(a|b){20}", r"((a{1,100}){1,100}){1,100}", "a" * 50_000,
     r"(\w{1,60}\s){1,60}", "(" * 300 + "a" + ")" * 300, "(a|" * 200 + "b" + ")" * 200],
)  # fmt: skip
def test_hostile_patterns_end(pattern):
    try:
        walk(grammar(regex=pattern), 0, most=10)
    except ValidationError as error:
        assert error.parameter == "structured_outputs.regex"


def test_an_anchor_alone_is_an_empty_answer():
    assert to_rust("^$") == "(?:)"
