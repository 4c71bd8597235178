import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.parsers.line_breaks import LineBreakTrimmer


def trim(pieces, at_most=None, is_whole=True):
    passed = []
    trimmer = LineBreakTrimmer(passed.append, at_most)
    for piece in pieces:
        trimmer.write(piece)
    trimmer.end(trim=is_whole)
    return "".join(passed)


@given(text=st.text("\na", max_size=10))
def test_all_line_breaks_around_a_text(text):
    assert trim([text]) == trim(text) == text.strip("\n")


@given(text=st.text("\na", max_size=10))
def test_one_line_break_at_each_end(text):
    expected = text.removeprefix("\n").removesuffix("\n")

    assert trim([text], at_most=1) == trim(text, at_most=1) == expected


@pytest.mark.parametrize("at_most", [None, 1])
def test_a_text_that_is_cut_off_keeps_its_last_line_breaks(at_most):
    assert trim("\na\n\n", at_most, is_whole=False) == "a\n\n"
