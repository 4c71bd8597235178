from hypothesis import given
from hypothesis import strategies as st

from jaxllm.frontend.stop_strings import StopStrings


def search_offline(text, stop, include, unsearched):
    """The rule, read literally: at the first place where one ends, the first of the list."""
    for end in range(unsearched + 1, len(text) + 1):
        for string in stop:
            if text[:end].endswith(string):
                return string, text[: end if include else end - len(string)]
    return None, text


@given(
    parts=st.lists(st.text("abc", max_size=4), max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
    num_unsearched=st.integers(0, 4),
)
def test_streaming_finds_what_a_search_in_the_whole_text_finds(
    parts, stop, include, num_unsearched
):
    watch = StopStrings(stop, include=include)
    shown = ""
    for i, part in enumerate(parts):
        shown += watch.push(part, search=i >= num_unsearched)
        if watch.match is not None:
            break
    else:
        shown += watch.flush()
    unsearched = len("".join(parts[:num_unsearched]))
    assert (watch.match, shown) == search_offline("".join(parts), stop, include, unsearched)


def test_no_more_is_held_back_than_could_begin_a_stop_string():
    watch = StopStrings(["STOP", "x"], include=False)
    assert watch.push("hello ST") == "hello"
    assert watch.push("A") == " "
    assert watch.flush() == "STA"
    assert watch.flush() == ""


def test_nothing_is_held_back_when_the_stop_string_is_included():
    watch = StopStrings(["STOP"], include=True)
    assert watch.push("hello ST") == "hello ST"
    assert watch.push("OPPED") == "OP"
    assert watch.match == "STOP"
