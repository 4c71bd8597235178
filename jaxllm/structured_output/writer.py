"""Writes one grammar of several: rules in Lark, with schemas and other grammars inside."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxllm.structured_output.regex import to_rust
from jaxllm.structured_output.schemas import JSONOptions, Schema, prepared

TEXT = r"/(?s:.*)/"


class Grammar(NamedTuple):
    """A grammar as llguidance reads it, and the parts of it that the request has given."""

    text: str
    parts: tuple["Part", ...]


class Part(NamedTuple):
    """A part of a grammar, by itself: if the whole is refused, it shows which field is wrong."""

    field: str
    text: str


class BadPart(ValueError):
    """A part of a request's form that cannot be followed."""

    def __init__(self, field: str, why: str):
        super().__init__(why)
        self.field = field


class GrammarWriter:
    """Collects rules and inner grammars. Its methods return expressions in Lark."""

    def __init__(self, special_tokens: Mapping[str, int], options: JSONOptions):
        """`special_tokens` are those that no text has, by their names."""
        self._special = special_tokens
        names = sorted(special_tokens, key=len, reverse=True)
        self._special_names = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._options = options
        self._rules: list[str] = []
        self._inner: dict[str, dict[str, Any]] = {}
        self._parts: list[Part] = []

    def rule(self, body: str, *, attribute: str = "") -> str:
        """Add a rule and return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal, one regular expression, and return its name."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """This text, with the special tokens that it names."""
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else quoted(piece)
            for piece in self._pieces(text)
        )

    def until(self, text: str, *, without: Sequence[str] = ()) -> str:
        """Any text, up to and with the first place where this text comes."""
        first, *rest = self._pieces(text)
        if first in self._special:
            # Without its letters, too: a reader of the text would take them for the token.
            head = f"{self.text([*without, first])} <[{self._special[first]}]>"
        else:
            head = self.rule(f"{self.text(without)} {quoted(first)}", attribute="[lazy]")
        return " ".join([head, *([self.literal("".join(rest))] if rest else [])])

    def text(self, without: Sequence[str] = ()) -> str:
        """Any text, but for these."""
        if not without:
            return TEXT
        words = "|".join(map(rust_escaped, without))
        return self.terminal(rf"{TEXT} & ~/(?s:.*)({words})(?s:.*)/")

    def choice(self, texts: Sequence[str]) -> str:
        """One of these texts."""
        if any(self._special_names.search(text) for text in texts):
            return f"({' | '.join(map(self.literal, texts))})"
        return self.terminal(" | ".join(map(quoted, dict.fromkeys(texts))))

    def regex(self, field: str, pattern: str) -> str:
        """A text that matches the whole pattern."""
        try:
            expression = f"/{to_rust(pattern)}/"
        except ValueError as error:
            raise BadPart(field, str(error)) from None
        self._parts.append(Part(field, _serialized([{"lark_grammar": f"start: {expression}"}])))
        return expression

    def json(self, field: str, schema: object) -> str:
        """A JSON value that fits a schema."""
        if not isinstance(schema, dict):
            raise BadPart(field, "it must be a JSON schema, which is an object")
        try:
            whole: Schema = prepared(schema, self._options)
        except ValueError as error:
            raise BadPart(field, str(error)) from None
        return self._add(field, {"json_schema": whole})

    def lark(self, field: str, text: str) -> str:
        """A text of another grammar in Lark."""
        return self._add(field, {"lark_grammar": text})

    def finish(self, start: str) -> Grammar:
        """The grammar of this expression."""
        if start in self._inner_by_reference and not self._rules:
            return Grammar(
                _serialized([self._inner_by_reference[start]]), tuple(self._parts)
            )  # alone, it is compiled faster
        rules = "\n".join([f"start: {start}", *self._rules])
        inner = [{"name": name} | one for name, one in self._inner.items()]
        return Grammar(_serialized([{"lark_grammar": rules}, *inner]), tuple(self._parts))

    @property
    def _inner_by_reference(self) -> dict[str, dict[str, Any]]:
        return {f"@{name}": one for name, one in self._inner.items()}

    def _add(self, field: str, grammar: dict[str, Any]) -> str:
        name = f"g{len(self._inner)}"
        self._inner[name] = grammar
        self._parts.append(Part(field, _serialized([grammar])))
        return f"@{name}"

    def _pieces(self, text: str) -> list[str]:
        """Split a text into special tokens and what is between them."""
        pieces, end = [], 0
        for found in self._special_names.finditer(text):
            pieces += [text[end : found.start()], found[0]]
            end = found.end()
        return [piece for piece in [*pieces, text[end:]] if piece]


def quoted(text: str) -> str:
    """A string in Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def rust_escaped(text: str) -> str:
    """A regex in Lark, without its slashes, that matches this text alone."""
    return "".join(
        char if char.isascii() and char.isalnum() else rf"\x{{{ord(char):x}}}" for char in text
    )


def _serialized(grammars: list[dict[str, Any]]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))
