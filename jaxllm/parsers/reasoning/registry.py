"""Reasoning formats by their names in `--reasoning-parser`."""

from jaxllm.errors import refused
from jaxllm.parsers.reasoning.base import ReasoningFormat, reasoning_parser
from jaxllm.parsers.reasoning.deepseek_r1 import DEEPSEEK_R1
from jaxllm.parsers.reasoning.qwen3 import QWEN3
from jaxllm.parsers.stream_parser import StreamParser

REASONING_FORMATS: dict[str, ReasoningFormat] = {"deepseek_r1": DEEPSEEK_R1, "qwen3": QWEN3}


def find_reasoning_format(name: str) -> ReasoningFormat:
    """Return the format of this name. Called at start, so that a wrong name is refused there."""
    if name not in REASONING_FORMATS:
        raise refused("reasoning_parser", name, f"use one of {', '.join(REASONING_FORMATS)}")
    return REASONING_FORMATS[name]


def make_reasoning_parser(
    name: str, prompt: str = "", enable_thinking: bool = True
) -> StreamParser:
    """Make a parser for one answer to this prompt; see `reasoning_parser`."""
    return reasoning_parser(find_reasoning_format(name), prompt, enable_thinking)
