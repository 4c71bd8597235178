"""Reads EBNF as llama.cpp and xgrammar have it. A rule ends where the next one begins."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxllm.structured_output.writer import quoted, rust_escaped

MAX_DEPTH = 64
MAX_TIMES = 10_000

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<name>[A-Za-z_][\w.-]*)|(?P<define>::=)
    |(?P<literal>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?P<class>\[\^?(?:\\.|[^\]\\])*\])
    |(?P<times>\{\s*\d+\s*(?:,\s*\d*\s*)?\})|(?P<ahead>\(\s*[=!])|(?P<sign>[()|*+?.])""",
    re.VERBOSE | re.DOTALL,
)
_MACROS = ("ExcludeToken", "TagDispatch", "Token", "TokenTagDispatch")  # xgrammar's
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|(.)", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "b": "\b", "0": "\0"}


@dataclass(frozen=True, slots=True)
class Text:
    """A literal, or a regex in Lark's notation."""

    lark: str
    is_empty: bool = False


@dataclass(frozen=True, slots=True)
class Ref:
    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    items: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Choice:
    items: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    item: "Node"
    times: str  # in Lark's notation


Node = Text | Ref | Sequence | Choice | Repeat


def read_rules(text: str) -> dict[str, Node]:
    """Read a grammar; raise ValueError with the line of what is wrong."""
    return _Reader(text).rules()


class _Reader:
    def __init__(self, text: str):
        self._tokens: list[tuple[str, str, int]] = []  # kind, text, line
        pos = 0
        while pos < len(text):
            found = _TOKEN.match(text, pos)
            line = text.count("\n", 0, pos) + 1
            if found is None:
                raise ValueError(f"line {line}: {text[pos : pos + 20]!r} is no EBNF")
            kind = found.lastgroup or ""
            if kind == "ahead":
                raise ValueError(f"line {line}: look-ahead cannot be followed")
            if (
                kind == "name"
                and found[0] in _MACROS
                and text[found.end() : found.end() + 1] == "("
            ):
                raise ValueError(
                    f"line {line}: {found[0]}(...) cannot be followed; use structural_tag"
                )
            if kind != "space":
                self._tokens.append((kind, found[0], line))
            pos = found.end()
        self._pos = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._pos < len(self._tokens):
            name = self._take("name")
            self._take("define")
            if name in rules:
                raise self._error(f"the rule {name!r} is there twice")
            rules[name] = self._choice(0)
            if self._kind() not in ("name", ""):
                raise self._error(f"{self._text()!r} is not expected here")
        return rules

    def _choice(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self._error(f"parentheses are nested deeper than {MAX_DEPTH} levels")
        items = [self._sequence(depth)]
        while self._text() == "|":
            self._pos += 1
            items.append(self._sequence(depth))
        return items[0] if len(items) == 1 else Choice(tuple(items))

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while (item := self._item(depth)) is not None:
            while (times := self._times()) is not None:
                item = Repeat(item, times)
            items.append(item)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self, depth: int) -> Node | None:
        kind, text = self._kind(), self._text()
        if kind == "name":
            if self._kind(1) == "define":
                return None  # the next rule
            self._pos += 1
            return Ref(text)
        if kind not in ("literal", "class") and text not in ("(", "."):
            return None
        self._pos += 1
        if text == ".":
            return Text("/(?s:.)/")
        if kind == "literal":
            value = "".join(_unescaped(text[1:-1]))
            return Text(quoted(value), is_empty=not value)
        if kind == "class":
            return Text(self._class(text[1:-1]))
        inner = self._choice(depth + 1)
        if self._text() != ")":
            raise self._error("a parenthesis is not closed")
        self._pos += 1
        return inner

    def _times(self) -> str | None:
        kind, text = self._kind(), self._text()
        if text in ("*", "+", "?") and kind == "sign":
            self._pos += 1
            return text
        if kind != "times":
            return None
        low, comma, high = text[1:-1].replace(" ", "").partition(",")
        if int(low) > MAX_TIMES or int(high or 0) > MAX_TIMES:
            raise self._error(f"{text} repeats more than {MAX_TIMES} times")
        if high and int(high) < int(low):
            raise self._error(f"{text} ends before it begins")
        self._pos += 1
        return f"{{{int(low)}{comma}{high.strip()}}}"

    def _class(self, text: str) -> str:
        is_negated = text.startswith("^")
        chars = list(_unescaped(text[is_negated:], keep_dash=True))
        if not chars:
            raise self._error("a class is empty")
        out = ["[^" if is_negated else "["]
        place = 0
        while place < len(chars):
            first = chars[place].removeprefix("\\") or "\\"
            is_range = place + 2 < len(chars) and chars[place + 1] == "-"
            last = (chars[place + 2].removeprefix("\\") or "\\") if is_range else first
            if last < first:
                raise self._error(f"the range {first}-{last} ends before it begins")
            out.append(rust_escaped(first) + (f"-{rust_escaped(last)}" if is_range else ""))
            place += 3 if is_range else 1
        return f"/{''.join(out)}]/"

    def _kind(self, ahead: int = 0) -> str:
        place = self._pos + ahead
        return self._tokens[place][0] if place < len(self._tokens) else ""

    def _text(self, ahead: int = 0) -> str:
        place = self._pos + ahead
        return self._tokens[place][1] if place < len(self._tokens) else ""

    def _take(self, kind: str) -> str:
        if self._kind() != kind:
            wanted = "the name of a rule" if kind == "name" else "'::='"
            raise self._error(f"{self._text()!r} is there and not {wanted}")
        self._pos += 1
        return self._tokens[self._pos - 1][1]

    def _error(self, why: str) -> ValueError:
        line = self._tokens[min(self._pos, len(self._tokens) - 1)][2]
        return ValueError(f"line {line}: {why}")


def _unescaped(text: str, *, keep_dash: bool = False) -> Iterator[str]:
    r"""The characters of a literal or a class. With `keep_dash`, an escaped one keeps a backslash,
    so that `\-` makes no range."""
    for found in _ESCAPE.finditer(text):
        escape = found[1]
        if not escape:
            yield found[0]
            continue
        code = escape[1:]
        value: str = chr(int(code, 16)) if code else _LETTERS.get(escape, escape)
        yield "\\" + value if keep_dash and value == "-" else value
