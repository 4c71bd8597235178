"""Tool call formats by their names in `--tool-call-parser`."""

from collections.abc import Sequence

from jaxllm.errors import refused
from jaxllm.parsers.stream_parser import StreamParser
from jaxllm.parsers.tools.base import Tool, ToolFormat, tool_parser
from jaxllm.parsers.tools.cohere_command3 import COHERE_COMMAND3
from jaxllm.parsers.tools.deepseek_v3 import DEEPSEEK_V3
from jaxllm.parsers.tools.gemma import FUNCTIONGEMMA, GEMMA4
from jaxllm.parsers.tools.glm45 import GLM45, HY_V3
from jaxllm.parsers.tools.granite import GRANITE, GRANITE_20B_FC
from jaxllm.parsers.tools.hermes import HERMES
from jaxllm.parsers.tools.hunyuan_a13b import HUNYUAN_A13B
from jaxllm.parsers.tools.internlm import INTERNLM
from jaxllm.parsers.tools.kimi_k2 import KIMI_K2
from jaxllm.parsers.tools.llama3_json import LLAMA3_JSON
from jaxllm.parsers.tools.longcat import LONGCAT
from jaxllm.parsers.tools.mistral import MISTRAL
from jaxllm.parsers.tools.olmo3 import OLMO3
from jaxllm.parsers.tools.openai import OPENAI
from jaxllm.parsers.tools.phi4_mini_json import PHI4_MINI_JSON
from jaxllm.parsers.tools.pythonic import LFM2, PYTHONIC
from jaxllm.parsers.tools.xlam import XLAM
from jaxllm.parsers.tools.xml_call import (
    DEEPSEEK_V32,
    MINIMAX_M2,
    QWEN3_XML,
    SEED_OSS,
    STEP3,
)

TOOL_FORMATS: dict[str, ToolFormat] = {
    "cohere_command3": COHERE_COMMAND3,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "ernie45": HERMES,
    "functiongemma": FUNCTIONGEMMA,
    "gemma4": GEMMA4,
    "glm45": GLM45,
    "glm47": GLM45,
    "granite": GRANITE,
    "granite-20b-fc": GRANITE_20B_FC,
    "granite4": HERMES,
    "hermes": HERMES,
    "hunyuan_a13b": HUNYUAN_A13B,
    "hy_v3": HY_V3,
    "internlm": INTERNLM,
    "jamba": HUNYUAN_A13B,
    "kimi_k2": KIMI_K2,
    "lfm2": LFM2,
    "llama3_json": LLAMA3_JSON,
    "llama4_json": LLAMA3_JSON,
    "llama4_pythonic": PYTHONIC,
    "longcat": LONGCAT,
    "mimo": QWEN3_XML,
    "minimax_m2": MINIMAX_M2,
    "mistral": MISTRAL,
    "nemotron_v3": QWEN3_XML,
    "olmo3": OLMO3,
    "openai": OPENAI,
    "phi4_mini_json": PHI4_MINI_JSON,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN3_XML,
    "qwen3_xml": QWEN3_XML,
    "seed_oss": SEED_OSS,
    "step3": STEP3,
    "step3p5": QWEN3_XML,
    "xlam": XLAM,
}


def find_tool_format(name: str) -> ToolFormat:
    """Return the format of this name. Called at start, so that a wrong name is refused there."""
    if name not in TOOL_FORMATS:
        raise refused("tool_call_parser", name, f"use one of {', '.join(TOOL_FORMATS)}")
    return TOOL_FORMATS[name]


def make_tool_parser(name: str, tools: Sequence[Tool] = ()) -> StreamParser:
    """Make a parser for one answer to a request with these tools."""
    return tool_parser(find_tool_format(name), tools)
