"""EBNF as llama.cpp and xgrammar have it (`root ::= ...`), translated to Lark.

What is regular becomes a terminal, one regular expression: a lexer takes the longest match, so that
`"a"* "ab"` in two terminals would never end.
"""

import re
from collections.abc import Iterator

from jaxllm.structured_output.ebnf_reader import (
    Choice,
    Node,
    Ref,
    Repeat,
    Sequence,
    Text,
    read_rules,
)

MAX_LEAVES = 1_000_000  # of a regular rule, written out


_RULE = re.compile(r"(?m)^[ \t]*[A-Za-z_][\w.-]*[ \t]*::=")


def is_ebnf(text: str) -> bool:
    """Whether a grammar is EBNF, and not Lark."""
    return _RULE.search(text) is not None


def to_lark(text: str) -> str:
    """Translate a grammar; raise ValueError with what cannot be followed."""
    rules = read_rules(text)
    if "root" not in rules:
        raise ValueError("there is no rule 'root', where the answer begins")
    for name, body in rules.items():
        for ref in _refs(body):
            if ref not in rules:
                raise ValueError(f"the rule {name!r} uses {ref!r}, which is not there")
    return _Writer(rules).lark()


def _refs(node: Node) -> Iterator[str]:
    match node:
        case Ref(name):
            yield name
        case Sequence(items) | Choice(items):
            for item in items:
                yield from _refs(item)
        case Repeat(item):
            yield from _refs(item)


class _Writer:
    def __init__(self, rules: dict[str, Node]):
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

    def _num_leaves(self, node: Node, leaves: dict[str, int]) -> int:
        match node:
            case Text():
                return 1
            case Ref(name):
                return leaves[name]
            case Sequence(items) | Choice(items):
                return sum(self._num_leaves(item, leaves) for item in items)
            case Repeat(item, times):
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

    def _is_regular(self, node: Node) -> bool:
        return all(name in self._regular for name in _refs(node))

    def _regex(self, node: Node) -> str:
        match node:
            case Text(lark):
                return lark
            case Ref(name):
                return self._names[name]
            case Sequence(items):
                return f"({' '.join(map(self._regex, items))})" if items else '""'
            case Choice(items):
                return f"({' | '.join(map(self._regex, items))})"
            case Repeat(item, times):
                return f"({self._regex(item)}){times}"

    def _rule(self, node: Node) -> str:
        if self._is_regular(node):
            return self._terminal(node)
        match node:
            case Sequence(items):
                return f"({' '.join(self._runs(items))})"
            case Choice(items):
                regular = [item for item in items if self._is_regular(item)]
                others = [self._rule(item) for item in items if not self._is_regular(item)]
                together = [self._terminal(Choice(tuple(regular)))] if regular else []
                return f"({' | '.join([*together, *others])})"
            case Repeat(item, times):
                return f"({self._rule(item)}){times}"
            case Ref(name):
                return self._names[name]
            case _:
                raise AssertionError(node)

    def _runs(self, items: tuple[Node, ...]) -> Iterator[str]:
        """The parts of a sequence, with what is regular side by side in one terminal."""
        run: list[Node] = []
        for item in items:
            if self._is_regular(item):
                run.append(item)
                continue
            if run:
                yield self._terminal(Sequence(tuple(run)))
                run = []
            yield self._rule(item)
        if run:
            yield self._terminal(Sequence(tuple(run)))

    def _terminal(self, node: Node) -> str:
        if isinstance(node, Text) and not node.is_empty:
            return node.lark
        if isinstance(node, Ref):
            return self._names[node.name]
        name = f"T{self._num_terminals}"
        self._num_terminals += 1
        self._lines.append(f"{name}: {self._regex(node)}")
        return name
