"""Where a text stops to be JSON."""

import msgspec
import pytest

from jaxllm.openai.wording import why_not_json


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (b'{"prompt": "a"', "it ends within a value (byte 14)"),
        (b'{"a": 1,}', "JSON is malformed: trailing comma in object (byte 8)"),
        # msgspec counts from the start of the string, and takes half a pair for an early end.
        (b'{"a": "\xff"}', "not UTF-8: invalid start byte (byte 7)"),
        (b'{"a": "\\ud800"}', "half a surrogate pair, which is no text (byte 7)"),
        ('{"ä": "\\ud800"}', "half a surrogate pair, which is no text (byte 8)"),
    ],
)
def test_the_byte_is_named_at_which_a_text_is_no_json(data, why):
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)) as caught:
        msgspec.json.decode(data)
    assert why_not_json(data, caught.value) == why
