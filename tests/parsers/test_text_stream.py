import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.parsers.text_stream import Markers, TextStream

LETTERS = re.compile(r"[a-z]*")
MARKERS = Markers("<ab>", "\n<ab>", "[x]")


def run(read, pieces):
    """What a piece of a parser returns and passes on when the text comes in these pieces."""
    text, passed = TextStream(), []
    reading = read(text, passed.append)
    try:
        next(reading)
        for piece in pieces:
            text.append(piece)
            next(reading)
        text.end()
        next(reading)
    except StopIteration as stop:
        return stop.value, "".join(passed)
    raise AssertionError("waits after the end")


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["ab", "c", "1d"], (None, "abc")),
        (["1"], (None, "")),
        ([], (None, "")),
        (["ab"], (None, "ab")),
    ],
)
def test_take_while(pieces, expected):
    assert run(lambda text, sink: text.take_while(LETTERS, sink), pieces) == expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["a<", "a", "b>c"], ("<ab>", "a")),
        (["a<a", "<ab>"], ("<ab>", "a<a")),
        (["\n", "\n<ab>"], ("\n<ab>", "\n")),
        (["\n<a", "x[", "x", "]"], ("[x]", "\n<ax")),
        (["ab<a"], (None, "ab<a")),
    ],
)
def test_take_until(pieces, expected):
    assert run(lambda text, sink: text.take_until(MARKERS, sink), pieces) == expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["<", "ab", ">"], (True, "<ab>")),
        (["<", "ax"], (False, "")),
        (["<a"], (False, "")),
        ([], (False, "")),
    ],
)
def test_accept(pieces, expected):
    assert run(lambda text, sink: text.accept("<ab>", sink), pieces) == expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [(["<", "a"], (True, "<a")), (["<x"], (False, "")), ([], (False, ""))],
)
def test_accept_what_may_be_cut_off(pieces, expected):
    def read(text, sink):
        return (yield from text.accept("<ab>", sink, may_be_cut_off=True))

    assert run(read, pieces) == expected


def test_nothing_is_held_that_no_marker_begins_with():
    text, passed = TextStream(), []
    reading = text.take_until(MARKERS, passed.append)

    for piece, expected in [("a", "a"), ("<", ""), ("b", "<b"), ("\n<", ""), ("<", "\n<")]:
        passed.clear()
        text.append(piece)
        next(reading)
        assert "".join(passed) == expected


@settings(deadline=None)
@given(text=st.text("<ab>[x]\n", max_size=30))
def test_take_until_finds_the_first_marker_by_the_character(text):
    found = MARKERS.pattern.search(text)
    expected = (found[0], text[: found.start()]) if found else (None, text)

    assert run(lambda stream, sink: stream.take_until(MARKERS, sink), list(text)) == expected
