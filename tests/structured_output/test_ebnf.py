"""Grammars in EBNF and in Lark."""

import json

import pytest

from jaxllm import ValidationError
from jaxllm.structured_output.ebnf import is_ebnf
from tests.structured_output.walks import fits, grammar, walk

ARITHMETIC = r"""
# sums of products
root  ::= expr "\n"?
expr  ::= term (("+" | "-") term)*
term  ::= factor ("*" factor)*
factor ::= [0-9]+ | "(" ws expr ws ")"
ws ::= [ \t]{0,2}
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""


def test_sums():
    form = grammar(grammar=ARITHMETIC)
    for answer in ("1+2*3", "(1)", "((12)*3-4)\n", "( 1 )"):
        assert fits(form, answer)
    for other in ("", "1+", "()", "1 + 2", "(   1)"):
        assert not fits(form, other)
    names = {"__builtins__": {}}
    for seed in range(8):
        answer = walk(form, seed)
        if answer is not None:
            zeros = "".join(c if c.isdigit() else f" {c} " for c in answer)
            eval(" ".join(w.lstrip("0") or "0" if w.isdigit() else w for w in zeros.split()), names)


def test_json_of_a_grammar():
    form = grammar(grammar=JSON)
    answers = [a for seed in range(3) if (a := walk(form, seed)) is not None]
    assert answers and all(isinstance(json.loads(a), dict) for a in answers)
    assert fits(form, '{"a": [1, -2.5e3, {"b": "\\u00e9"}], "c": null}')


def test_the_example_of_vllm():
    form = grammar(grammar=SQL)
    assert fits(form, "SELECT col_1  from table_1  where col_2 = 1 ")
    assert not fits(form, "SELECT col_3  from table_1  where col_2 = 1 ")


def test_neighbours_do_not_steal_letters():
    form = grammar(grammar='root ::= "a"* "ab" | [a-z]* [0-9] | root "!"')
    for answer in ("ab", "aab", "abc1", "ab!", "z0!!"):
        assert fits(form, answer), answer
    assert not fits(form, "a") and not fits(form, "!")


def test_notation():
    form = grammar(
        grammar=r"""
        root ::= first-part . [^\]a-c\n-] [\x41-\u0043] 'it\'s' "" # the end
          | other.one
        first-part ::= "\t\"\\" | "/"{2}
        other.one ::= "é" ("ü"){1,} ( | "x")
    """
    )
    for answer in ("//?dAit's", "\t\"\\\nzCit's", "éüü", "éüx"):
        assert fits(form, answer), answer
    for other in ("//?aAit's", "//?-Ait's", "é", "/?dAit's"):
        assert not fits(form, other), other


def test_lark_stays_lark():
    text = 'start: greeting " " NAME\ngreeting: "hello" | "bye"\nNAME: /[A-Z][a-z]+/'
    assert not is_ebnf(text) and is_ebnf(SQL)
    form = grammar(grammar=text)
    assert fits(form, "hello Anna") and not fits(form, "hello anna")
    assert fits(grammar(grammar='start: "::=" %json {"type": "integer"}'), "::=3")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('a ::= "b"', "no rule 'root'"),
        ("root ::= a", "uses 'a', which is not there"),
        ('root ::= "a"\nroot ::= "b"', "'root' is there twice"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a" ) "b"', "not expected"),
        ('root ::= "a', "line 1"),
        ('root ::= "a"\n\n  ::= "b"', "line 3"),
        ("root ::= []", "a class is empty"),
        ("root ::= [z-a]", "ends before it begins"),
        ('root ::= "a"{3,2}', "ends before it begins"),
        ('root ::= "a"{99999}', "more than 10000"),
        ('root ::= "a" (= "b")', "look-ahead"),
        ('root ::= (("a"{10000}){10000}){10000}', "more than 1000000 parts"),
        ('root ::= TagDispatch(("a", b))', "use structural_tag"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "deeper than 64"),
        ('start: "a" b', "unknown name"),
        ("no grammar at all", "grammar"),
        ("start: /(?=a)b/", "look-around"),
        ("start: x\nx[temperature=0.5]: /a/", "'temperature'"),
        ('start: x\nx[stop="b"]: /a*/', "'stop'"),
        ("start: " + "(" * 3000 + '"a"' + ")" * 3000, "deeply nested"),
    ],
)
def test_what_cannot_be_followed_is_refused(text, why):
    with pytest.raises(ValidationError, match=why) as caught:
        grammar(grammar=text)
    assert caught.value.parameter == "structured_outputs.grammar"


@pytest.mark.parametrize(
    "text",
    [
        'root ::= root root | "a"',
        'root ::= "" | root | "a"',
        'root ::= a\na ::= b a | "x"\nb ::= "" | "y"',
        "root ::= " + " | ".join(f'"{n}"' for n in range(5000)),
        "\n".join(
            ["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)), 'r40 ::= "a"']
        ),
        'root ::= ((("a"*)*)*)*',
    ],
)
def test_hostile_grammars_end(text):
    try:
        walk(grammar(grammar=text), 0, most=10)
    except ValidationError as error:
        assert error.parameter == "structured_outputs.grammar"
