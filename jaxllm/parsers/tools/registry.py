"""Tool call formats by their names in `--tool-call-parser`."""

from collections.abc import Sequence

from jaxllm.errors import refused
from jaxllm.parsers.stream_parser import StreamParser
from jaxllm.parsers.tools.base import Tool, ToolFormat, tool_parser
from jaxllm.parsers.tools.deepseek_v3 import DEEPSEEK_V3
from jaxllm.parsers.tools.hermes import HERMES
from jaxllm.parsers.tools.llama3_json import LLAMA3_JSON
from jaxllm.parsers.tools.mistral import MISTRAL
from jaxllm.parsers.tools.pythonic import PYTHONIC
from jaxllm.parsers.tools.qwen3_xml import QWEN3_XML

TOOL_FORMATS: dict[str, ToolFormat] = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V3,
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN3_XML,
    "qwen3_xml": QWEN3_XML,
}


def find_tool_format(name: str) -> ToolFormat:
    """Return the format of this name. Called at start, so that a wrong name is refused there."""
    if name not in TOOL_FORMATS:
        raise refused("tool_call_parser", name, f"use one of {', '.join(TOOL_FORMATS)}")
    return TOOL_FORMATS[name]


def make_tool_parser(name: str, tools: Sequence[Tool] = ()) -> StreamParser:
    """Make a parser for one answer to a request with these tools."""
    return tool_parser(find_tool_format(name), tools)
