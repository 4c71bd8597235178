"""Lines of a file as items."""

import io
import tracemalloc

import pytest

from jaxllm.batch.input import read_items
from jaxllm.errors import ValidationError


def items(data: bytes, max_line_bytes: int = 100):
    return list(read_items(io.BytesIO(data), max_line_bytes))


def test_empty_lines_are_no_items_but_count_as_lines():
    found = items(b"a\n\n \r\nb\r\nc")
    assert [(item.number, item.line, item.text) for item in found] == [
        (0, 1, "a\n"),
        (1, 4, "b\r\n"),
        (2, 5, "c"),
    ]


def test_sizes_add_up_to_the_file():
    data = b"a\n\n \r\nb\r\nc"
    assert sum(item.num_bytes for item in items(data)) == len(data)


def test_a_byte_order_mark_is_not_part_of_the_first_line():
    assert items(b'\xef\xbb\xbf"x"\n')[0].text == '"x"\n'


def test_only_newlines_end_a_line():
    assert len(items('"a\u2028b\x0cc"\n'.encode())) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'"caf\xe9"', "not UTF-8 at byte 4 of the line"),
        (b"x" * 100, "line='101 bytes': at most --max-line-bytes=100"),
    ],
)
def test_a_line_that_cannot_be_read_harms_no_other(line, message):
    before, bad, after = items(b"before\n" + line + b"\nafter\n")
    assert (before.text, after.text) == ("before\n", "after\n")
    assert isinstance(bad.text, ValidationError)
    assert message in str(bad.text)


def test_an_overlong_line_is_not_held_in_memory():
    class Zeros(io.RawIOBase):
        left = 64 << 20
        largest = 0

        def read(self, size=-1):
            size = min(size, self.left)
            self.left -= size
            return b"0" * size

    tracemalloc.start()
    (item,) = read_items(Zeros(), 1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(item.text, ValidationError)
    assert item.num_bytes == 64 << 20
    assert peak < 8 << 20
