"""Regexes as users write them, in the syntax of the grammar's own: Rust's.

The answer matches the whole pattern, as by Python's `re.fullmatch`. Anchors at its ends and lazy
quantifiers say nothing then, and are dropped. A brace that is no quantifier, and brackets and
operators within a class, are letters, as in Python. `\\d`, `\\w` and `\\s` are ASCII, as in JSON
schemas; `\\D`, `\\W` and `\\S` exclude all of Unicode's, so that an answer fits either reading.
What cannot be followed, such as look-around, is refused.
"""

import re
from dataclasses import dataclass, field

_ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
_GROUP = re.compile(r"\?(?:P?<\w+>|[a-zA-Z-]*:)")
_FLAGS = re.compile(r"\?[a-zA-Z-]+\)")
_REFUSED_GROUPS = {
    "?=": "look-ahead", "?!": "look-ahead", "?<=": "look-behind", "?<!": "look-behind",
    "?>": "an atomic group", "?P=": "a reference to a group", "?(": "a condition",
    "?#": "a comment",
}  # fmt: skip


@dataclass
class _Level:
    """What is known of a group while it is read."""

    is_first: bool  # nothing comes before it
    starts: bool = True  # nothing comes before this place
    ends: bool = False  # an anchor says that nothing follows
    has_anchor: bool = False
    any_ends: bool = field(default=False)  # in one of the alternatives


def to_rust(pattern: str) -> str:
    """Translate a pattern; raise ValueError with what cannot be followed."""
    return _Translation(pattern).run()


class _Translation:
    def __init__(self, pattern: str):
        self._text = pattern
        self._pos = 0
        self._out: list[str] = []
        self._levels = [_Level(is_first=True)]

    def run(self) -> str:
        while self._pos < len(self._text):
            self._step(self._text[self._pos])
        if len(self._levels) > 1:
            raise ValueError("a parenthesis is not closed")
        return "".join(self._out) or "(?:)"

    def _step(self, char: str) -> None:
        level = self._levels[-1]
        self._pos += 1
        match char:
            case "(":
                self._open()
            case ")":
                self._close()
            case "|":
                level.any_ends |= level.ends
                level.starts, level.ends = level.is_first, False
                self._out.append("|")
            case "^":
                self._begin_anchor()
            case "$":
                level.ends = level.has_anchor = True
            case "[":
                self._atom(self._class())
            case "\\":
                self._escape()
            case "*" | "+" | "?":
                raise ValueError(f"{char!r} repeats nothing")
            case "{":
                self._atom(r"\{")
            case "/":
                self._atom(r"\/")
            case _:
                self._atom(char)

    def _atom(self, text: str) -> None:
        level = self._levels[-1]
        if level.ends:
            raise ValueError("'$' in the middle cannot be followed; it may stand at the end")
        level.starts = False
        self._out.append(text)
        self._quantifier(has_anchor=False)

    def _quantifier(self, *, has_anchor: bool) -> None:
        """Read a quantifier, if one follows."""
        found = _QUANTIFIER.match(self._text, self._pos)
        if found is None or found[0] in ("{}", "{,}"):
            return
        if has_anchor and found[0] != "?":
            raise ValueError("'^' or '$' in a group that repeats cannot be followed")
        self._pos = found.end()
        is_braced = found[0][0] == "{"
        text = f"{{{found[1] or 0}{found[2]}{found[3]}}}" if is_braced else found[0]
        self._out.append(text)
        follower = self._text[self._pos : self._pos + 1]
        if follower == "?":
            self._pos += 1  # lazy: the same whole matches
        elif follower == "+":
            raise ValueError(f"the possessive quantifier {found[0] + '+'!r} cannot be followed")

    def _open(self) -> None:
        rest = self._text[self._pos : self._pos + 4]
        for start, name in _REFUSED_GROUPS.items():
            if rest.startswith(start):
                raise ValueError(f"{name}, {'(' + start!r}, cannot be followed")
        level = self._levels[-1]
        if flags := _FLAGS.match(self._text, self._pos):
            self._check_flags(flags[0])
            self._pos = flags.end()
            self._out.append("(" + flags[0])
            return
        if level.ends:
            raise ValueError("'$' in the middle cannot be followed; it may stand at the end")
        head = _GROUP.match(self._text, self._pos)
        self._out.append("(")
        if head is not None:
            self._check_flags(head[0].partition("<")[0])
            self._pos = head.end()
            self._out.append(head[0])
        elif rest.startswith("?"):
            raise ValueError(f"there is no group {'(' + rest[:2]!r}")
        self._levels.append(_Level(level.starts, starts=level.starts))

    def _check_flags(self, flags: str) -> None:
        if "m" in flags:
            raise ValueError("the flag 'm', of several lines, cannot be followed")

    def _close(self) -> None:
        if len(self._levels) == 1:
            raise ValueError("a parenthesis is closed that is not open")
        inner = self._levels.pop()
        self._out.append(")")
        self._quantifier(has_anchor=inner.has_anchor)
        level = self._levels[-1]
        level.starts = False
        level.ends = inner.any_ends or inner.ends
        level.has_anchor |= inner.has_anchor

    def _begin_anchor(self) -> None:
        level = self._levels[-1]
        if not level.starts:
            raise ValueError("'^' in the middle cannot be followed; it may stand at the beginning")
        level.has_anchor = True

    def _escape(self) -> None:
        char = self._text[self._pos : self._pos + 1]
        if not char:
            raise ValueError("it ends in a backslash")
        if char in "AZz":
            self._pos += 1
            if char == "A":
                return self._begin_anchor()
            self._levels[-1].ends = self._levels[-1].has_anchor = True
        elif char in "bB":
            raise ValueError(f"the border of a word, '\\{char}', cannot be followed")
        elif char.isdigit():
            raise ValueError(f"'\\{char}' refers to a group or an octal number; use \\x..")
        elif char in _ASCII:
            self._pos += 1
            self._atom(f"[{_ASCII[char]}]")
        elif char == "S":
            self._pos += 1
            self._atom(_NO_SPACE)
        else:
            self._atom(self._escaped())

    def _escaped(self) -> str:
        """Read the rest of an escape that both syntaxes have, after the backslash."""
        rest = self._text[self._pos :]
        found = re.match(
            r"x\{[0-9a-fA-F]+\}|x[0-9a-fA-F]{2}|u\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}"
            r"|U[0-9a-fA-F]{8}|[pP](?:\{[^}]*\}|\w)|.",
            rest,
            re.DOTALL,
        )
        assert found, rest
        self._pos += found.end()
        text = found[0]
        if len(text) == 1 and not text.isascii():
            return re.escape(text)
        if len(text) == 1 and (text.isspace() or text in "<>'\"`@#%&,:;=!~-_"):
            return re.sub(r"[#&~\s-]", lambda m: f"\\x{ord(m[0]):02x}", text)
        return "\\" + text

    def _class(self) -> str:
        out = ["["]
        if self._text.startswith("^", self._pos):
            out.append("^")
            self._pos += 1
        is_first = True
        while True:
            char = self._text[self._pos : self._pos + 1]
            if not char:
                raise ValueError("a class, '[', is not closed")
            self._pos += 1
            if char == "]" and not is_first:
                return "".join([*out, "]"])
            is_first = False
            if char == "\\":
                out.append(self._class_escape())
            elif char in "[]&~/" or (char == "-" and out[-1] == "-"):
                out.append("\\" + char)
            else:
                out.append(char)

    def _class_escape(self) -> str:
        char = self._text[self._pos : self._pos + 1]
        if char in _ASCII and char:
            self._pos += 1
            return _ASCII[char]
        if char == "S":
            self._pos += 1
            return _NO_SPACE
        if char == "b":
            self._pos += 1
            return r"\x08"
        if char.isdigit() or not char:
            raise ValueError(f"'\\{char}' is no character; use \\x..")
        return self._escaped()


_NO_SPACE = r"[^\s\x1c-\x1f]"
