"""Helpers for every format of tool calls."""

import pytest

from jaxllm.parsers.deltas import add_up
from jaxllm.parsers.tools.base import Tool
from jaxllm.parsers.tools.registry import make_tool_parser

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "exact": {"type": "boolean"},
            "areas": {"type": "array", "items": {"type": "string"}},
        },
    },
)


class Parsed:
    """A whole answer, comparable without its ids, which are random."""

    def __init__(self, answer):
        self.content = answer.content
        self.calls = [(call.name, call.arguments) for call in answer.tool_calls]
        self.ids = [call.id for call in answer.tool_calls]

    def __eq__(self, other):
        return (self.content, self.calls) == (other.content, other.calls)

    def __repr__(self):
        return f"content={self.content!r} calls={self.calls!r}"


def parse_whole(name, text):
    return Parsed(make_tool_parser(name, [WEATHER]).parse(text))


def parse_pieces(name, pieces):
    parser = make_tool_parser(name, [WEATHER])
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return Parsed(add_up(deltas + parser.finish()))


@pytest.fixture
def parse(request):
    """A function that parses a whole answer in the module's format."""
    return lambda text: parse_whole(request.module.FORMAT, text)


@pytest.fixture
def stream(request):
    """A parser that has been fed some text."""

    def make(text):
        parser = make_tool_parser(request.module.FORMAT, [WEATHER])
        parser.feed(text)
        return parser

    return make


@pytest.fixture
def parse_split():
    return parse_pieces
