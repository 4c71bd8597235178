"""Structural tags: text in which pieces have a form, such as calls of tools.

Two notations, both objects. The older one has `structures` and `triggers`: text is free until a
trigger; then one of the structures follows, `begin`, JSON of a `schema`, `end`. The newer one,
xgrammar's, has a `format`: a tree of the kinds below.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.structured_output.ebnf import is_ebnf, to_lark
from jaxllm.structured_output.writer import BadPart, GrammarWriter

_Format = dict[str, Any]


def write_tag(writer: GrammarWriter, field: str, tag: _Format) -> str:
    """Write a structural tag; raise BadPart with the place of what cannot be followed."""
    tags = _Tags(writer)
    if "structures" in tag:
        _check_keys(field, tag, {"type", "structures", "triggers"})
        return tags.older(field, tag)
    _check_keys(field, tag, {"type", "format"})
    if "format" not in tag:
        raise BadPart(field, "it needs 'format', or 'structures' and 'triggers'")
    return tags.write(f"{field}.format", tag["format"])


class _Tags:
    def __init__(self, writer: GrammarWriter):
        self._writer = writer
        self._kinds: dict[str, tuple[set[str], Callable[[str, _Format], str]]] = {
            "const_string": ({"value"}, self._const),
            "json_schema": ({"json_schema"}, self._json),
            "regex": ({"pattern"}, self._regex),
            "grammar": ({"grammar"}, self._grammar),
            "any_text": ({"excludes"}, self._any_text),
            "sequence": ({"elements"}, self._sequence),
            "or": ({"elements"}, self._or),
            "tag": ({"begin", "content", "end"}, self._tag),
            "triggered_tags": (
                {"triggers", "tags", "at_least_one", "stop_after_first", "excludes"},
                self._triggered,
            ),
            "tags_with_separator": (
                {"tags", "separator", "at_least_one", "stop_after_first"},
                self._separated,
            ),
        }

    def write(self, field: str, given: object) -> str:
        if not isinstance(given, dict):
            raise BadPart(field, "it must be an object with a 'type'")
        kind = given.get("type")
        if not isinstance(kind, str) or kind not in self._kinds:
            raise BadPart(f"{field}.type", f"{kind!r:.40} is not one of {', '.join(self._kinds)}")
        keys, write = self._kinds[kind]
        _check_keys(field, given, {"type", *keys})
        return write(field, given)

    def older(self, field: str, given: _Format) -> str:
        tags = []
        for place, one in enumerate(_list(field, given, "structures")):
            where = f"{field}.structures[{place}]"
            if not isinstance(one, dict):
                raise BadPart(where, "it must be an object")
            _check_keys(where, one, {"begin", "schema", "end"})
            schema = self._writer.json(f"{where}.schema", one.get("schema"))
            tags.append((_text(where, one, "begin"), schema, _text(where, one, "end", True)))
        return self._dispatch(field, _texts(field, given, "triggers"), tags)

    def _const(self, field: str, given: _Format) -> str:
        return self._writer.literal(_text(field, given, "value"))

    def _json(self, field: str, given: _Format) -> str:
        return self._writer.json(f"{field}.json_schema", given.get("json_schema"))

    def _regex(self, field: str, given: _Format) -> str:
        return self._writer.regex(f"{field}.pattern", _text(field, given, "pattern"))

    def _grammar(self, field: str, given: _Format) -> str:
        return write_grammar(self._writer, f"{field}.grammar", _text(field, given, "grammar"))

    def _any_text(self, field: str, given: _Format) -> str:
        return self._writer.text(_texts(field, given, "excludes", may_lack=True))

    def _sequence(self, field: str, given: _Format) -> str:
        elements = _list(field, given, "elements")
        parts, free = [], None
        for place, one in enumerate(elements):
            where = f"{field}.elements[{place}]"
            kind = one.get("type") if isinstance(one, dict) else None
            if free is not None:
                if kind != "const_string":
                    raise BadPart(where, "after any_text in a sequence comes const_string")
                parts.append(self._writer.until(_text(where, one, "value"), without=free))
                free = None
            elif kind == "any_text" and place + 1 < len(elements):
                free = _texts(where, one, "excludes", may_lack=True)
            else:
                parts.append(self.write(where, one))
        return f"({' '.join(parts)})"

    def _or(self, field: str, given: _Format) -> str:
        elements = _list(field, given, "elements")
        parts = [self.write(f"{field}.elements[{i}]", one) for i, one in enumerate(elements)]
        return f"({' | '.join(parts)})"

    def _tag(self, field: str, given: _Format) -> str:
        begin, content, end = self._parts_of(field, given)
        ends = self._writer.literal(end)
        return f"({self._writer.literal(begin)} {content} {ends})"

    def _parts_of(self, field: str, given: object) -> tuple[str, str, str]:
        """The begin, the content as an expression, and the end of a tag."""
        if not isinstance(given, dict):
            raise BadPart(field, "it must be an object")
        _check_keys(field, given, {"type", "begin", "content", "end"})
        begin, end = _text(field, given, "begin", True), given.get("end")
        if isinstance(end, list):
            if len(end) != 1:
                raise BadPart(f"{field}.end", "one end is supported, and not several")
            end = end[0]
        if not isinstance(end, str):
            raise BadPart(f"{field}.end", "it must be a string")
        content = given.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            without = _texts(f"{field}.content", content, "excludes", may_lack=True)
            return begin, self._writer.until(end, without=without), ""
        return begin, self.write(f"{field}.content", content), end

    def _triggered(self, field: str, given: _Format) -> str:
        tags = [
            self._parts_of(f"{field}.tags[{place}]", one)
            for place, one in enumerate(_list(field, given, "tags"))
        ]
        return self._dispatch(
            field,
            _texts(field, given, "triggers"),
            tags,
            at_least_one=_flag(field, given, "at_least_one"),
            stops=_flag(field, given, "stop_after_first"),
            without=_texts(field, given, "excludes", may_lack=True),
        )

    def _dispatch(
        self,
        field: str,
        triggers: Sequence[str],
        tags: Sequence[tuple[str, str, str]],
        *,
        at_least_one: bool = False,
        stops: bool = False,
        without: Sequence[str] = (),
    ) -> str:
        """Free text until a trigger; then the rest of a tag that begins with it."""
        writer = self._writer
        groups: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        whole = []
        for begin, content, end in tags:
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise BadPart(field, f"no trigger is the beginning of {begin!r:.60}")
            rest = f"{content} {writer.literal(end)}"
            groups[trigger].append(f"{writer.literal(begin.removeprefix(trigger))} {rest}")
            whole.append(f"{writer.literal(begin)} {rest}")
        texts = [
            f"{writer.until(trigger, without=without)} ({' | '.join(rests)})"
            for trigger, rests in groups.items()
            if rests
        ]
        any_tag = writer.rule(" | ".join(texts))
        tail = writer.text(without)
        if at_least_one:
            first = writer.rule(" | ".join(whole))
            return first if stops else f"({first} {any_tag}* {tail})"
        return f"({any_tag} | {tail})" if stops else f"({any_tag}* {tail})"

    def _separated(self, field: str, given: _Format) -> str:
        writer = self._writer
        tags = [
            self._tag(f"{field}.tags[{place}]", one)
            for place, one in enumerate(_list(field, given, "tags"))
        ]
        one = writer.rule(" | ".join(tags))
        separator = writer.literal(_text(field, given, "separator", True))
        several = one if _flag(field, given, "stop_after_first") else f"{one} ({separator} {one})*"
        return f"({several})" if _flag(field, given, "at_least_one") else f"({several})?"


def write_grammar(writer: GrammarWriter, field: str, text: str) -> str:
    """Write a user's grammar, in Lark or in EBNF."""
    try:
        return writer.lark(field, to_lark(text) if is_ebnf(text) else checked_lark(text))
    except BadPart:
        raise
    except ValueError as error:
        raise BadPart(field, str(error)) from None


def checked_lark(text: str) -> str:
    """Refuse what no mask can follow: llguidance would ignore it, or go back over tokens."""
    bare = re.sub(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*', " ", text)
    for name in re.findall(r"\[[^\]\n]*?\b(temperature|stop)\s*=", bare):
        raise ValueError(f"the attribute {name!r} of a rule cannot be followed")
    return text


def _check_keys(field: str, given: _Format, known: set[str]) -> None:
    for name in given:
        if name not in known:
            raise BadPart(f"{field}.{name}", f"no such field; there are {', '.join(sorted(known))}")


def _text(field: str, given: _Format, name: str, may_be_empty: bool = False) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise BadPart(f"{field}.{name}", "it must be a string that is not empty")
    return value


def _list(field: str, given: _Format, name: str) -> list[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not value:
        raise BadPart(f"{field}.{name}", "it must be a list that is not empty")
    return value


def _texts(field: str, given: _Format, name: str, may_lack: bool = False) -> list[str]:
    if may_lack and not given.get(name):
        return []
    texts = _list(field, given, name)
    if not all(isinstance(text, str) and text for text in texts):
        raise BadPart(f"{field}.{name}", "it must have strings that are not empty")
    return texts


def _flag(field: str, given: _Format, name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise BadPart(f"{field}.{name}", "it must be true or false")
    return value
