"""EBNF as llama.cpp and xgrammar have it (`root ::= ...`), translated to Lark.

What is regular becomes a terminal, one regular expression: a lexer takes the longest match, so that
`"a"* "ab"` in two terminals would never end. A rule ends where the next one begins.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxllm.structured_output.writer import quoted, rust_escaped

MAX_DEPTH = 64
MAX_TIMES = 10_000
MAX_LEAVES = 1_000_000  # of a regular rule, written out

_RULE = re.compile(r"(?m)^[ \t]*[A-Za-z_][\w.-]*[ \t]*::=")
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
class _Text:
    """A literal, or a regex in Lark's notation."""

    lark: str
    is_empty: bool = False


@dataclass(frozen=True, slots=True)
class _Ref:
    name: str


@dataclass(frozen=True, slots=True)
class _Sequence:
    items: "tuple[_Node, ...]"


@dataclass(frozen=True, slots=True)
class _Choice:
    items: "tuple[_Node, ...]"


@dataclass(frozen=True, slots=True)
class _Repeat:
    item: "_Node"
    times: str  # in Lark's notation


_Node = _Text | _Ref | _Sequence | _Choice | _Repeat


def is_ebnf(text: str) -> bool:
    """Whether a grammar is EBNF, and not Lark."""
    return _RULE.search(text) is not None


def to_lark(text: str) -> str:
    """Translate a grammar; raise ValueError with what cannot be followed."""
    rules = _Reader(text).rules()
    if "root" not in rules:
        raise ValueError("there is no rule 'root', where the answer begins")
    for name, body in rules.items():
        for ref in _refs(body):
            if ref not in rules:
                raise ValueError(f"the rule {name!r} uses {ref!r}, which is not there")
    return _Writer(rules).lark()


def _refs(node: _Node) -> Iterator[str]:
    match node:
        case _Ref(name):
            yield name
        case _Sequence(items) | _Choice(items):
            for item in items:
                yield from _refs(item)
        case _Repeat(item):
            yield from _refs(item)


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

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while self._pos < len(self._tokens):
            name = self._take("name")
            self._take("define")
            if name in rules:
                raise self._error(f"the rule {name!r} is there twice")
            rules[name] = self._choice(0)
            if self._kind() not in ("name", ""):
                raise self._error(f"{self._text()!r} is not expected here")
        return rules

    def _choice(self, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise self._error(f"parentheses are nested deeper than {MAX_DEPTH} levels")
        items = [self._sequence(depth)]
        while self._text() == "|":
            self._pos += 1
            items.append(self._sequence(depth))
        return items[0] if len(items) == 1 else _Choice(tuple(items))

    def _sequence(self, depth: int) -> _Node:
        items: list[_Node] = []
        while (item := self._item(depth)) is not None:
            while (times := self._times()) is not None:
                item = _Repeat(item, times)
            items.append(item)
        return items[0] if len(items) == 1 else _Sequence(tuple(items))

    def _item(self, depth: int) -> _Node | None:
        kind, text = self._kind(), self._text()
        if kind == "name":
            if self._kind(1) == "define":
                return None  # the next rule
            self._pos += 1
            return _Ref(text)
        if kind not in ("literal", "class") and text not in ("(", "."):
            return None
        self._pos += 1
        if text == ".":
            return _Text("/(?s:.)/")
        if kind == "literal":
            value = "".join(_unescaped(text[1:-1]))
            return _Text(quoted(value), is_empty=not value)
        if kind == "class":
            return _Text(self._class(text[1:-1]))
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


class _Writer:
    def __init__(self, rules: dict[str, _Node]):
        self._rules = rules
        self._regular = self._find_regular()
        number = {name: place for place, name in enumerate(rules)}
        self._names = {
            name: f"{'N' if name in self._regular else 'n'}{number[name]}" for name in rules
        }
        self._lines: list[str] = []
        self._num_terminals = 0

    def lark(self) -> str:
        leaves: dict[str, int] = {}
        for name in self._regular:
            leaves[name] = self._num_leaves(self._rules[name], leaves)
            if leaves[name] > MAX_LEAVES:
                raise ValueError(f"the rule {name!r} has more than {MAX_LEAVES} parts, written out")
        self._lines.append(f"start: {self._names['root']}")
        for name, body in self._rules.items():
            is_regular = name in self._regular
            text = self._regex(body) if is_regular else self._rule(body)
            self._lines.append(f"{self._names[name]}: {text}")
        return "\n".join(self._lines)

    def _num_leaves(self, node: _Node, leaves: dict[str, int]) -> int:
        match node:
            case _Text():
                return 1
            case _Ref(name):
                return leaves[name]
            case _Sequence(items) | _Choice(items):
                return sum(self._num_leaves(item, leaves) for item in items)
            case _Repeat(item, times):
                most = max(map(int, re.findall(r"\d+", times)), default=1)
                return self._num_leaves(item, leaves) * most

    def _find_regular(self) -> dict[str, None]:
        """The rules that do not refer to themselves, even by others, each after those it uses."""
        refs = {name: set(_refs(body)) for name, body in self._rules.items()}
        regular: dict[str, None] = {}
        waiting = {name: len(used) for name, used in refs.items()}
        users: dict[str, list[str]] = {name: [] for name in refs}
        for name, used in refs.items():
            for one in used:
                users[one].append(name)
        ready = [name for name, num in waiting.items() if num == 0]
        while ready:
            name = ready.pop()
            regular[name] = None
            for user in users[name]:
                waiting[user] -= 1
                if waiting[user] == 0:
                    ready.append(user)
        return regular

    def _is_regular(self, node: _Node) -> bool:
        return all(name in self._regular for name in _refs(node))

    def _regex(self, node: _Node) -> str:
        match node:
            case _Text(lark):
                return lark
            case _Ref(name):
                return self._names[name]
            case _Sequence(items):
                return f"({' '.join(map(self._regex, items))})" if items else '""'
            case _Choice(items):
                return f"({' | '.join(map(self._regex, items))})"
            case _Repeat(item, times):
                return f"({self._regex(item)}){times}"

    def _rule(self, node: _Node) -> str:
        if self._is_regular(node):
            return self._terminal(node)
        match node:
            case _Sequence(items):
                return f"({' '.join(self._runs(items))})"
            case _Choice(items):
                regular = [item for item in items if self._is_regular(item)]
                others = [self._rule(item) for item in items if not self._is_regular(item)]
                together = [self._terminal(_Choice(tuple(regular)))] if regular else []
                return f"({' | '.join([*together, *others])})"
            case _Repeat(item, times):
                return f"({self._rule(item)}){times}"
            case _Ref(name):
                return self._names[name]
            case _:
                raise AssertionError(node)

    def _runs(self, items: tuple[_Node, ...]) -> Iterator[str]:
        """The parts of a sequence, with what is regular side by side in one terminal."""
        run: list[_Node] = []
        for item in items:
            if self._is_regular(item):
                run.append(item)
                continue
            if run:
                yield self._terminal(_Sequence(tuple(run)))
                run = []
            yield self._rule(item)
        if run:
            yield self._terminal(_Sequence(tuple(run)))

    def _terminal(self, node: _Node) -> str:
        if isinstance(node, _Text) and not node.is_empty:
            return node.lark
        if isinstance(node, _Ref):
            return self._names[node.name]
        name = f"T{self._num_terminals}"
        self._num_terminals += 1
        self._lines.append(f"{name}: {self._regex(node)}")
        return name
