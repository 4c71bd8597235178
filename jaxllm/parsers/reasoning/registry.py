"""Reasoning formats by their names in `--reasoning-parser`."""

from jaxllm.errors import refused
from jaxllm.parsers.reasoning.base import ReasoningFormat, reasoning_parser
from jaxllm.parsers.reasoning.cohere_command3 import COHERE_COMMAND3
from jaxllm.parsers.reasoning.deepseek_r1 import DEEPSEEK_R1
from jaxllm.parsers.reasoning.deepseek_v3 import DEEPSEEK_V3
from jaxllm.parsers.reasoning.ernie45 import ERNIE45
from jaxllm.parsers.reasoning.gemma4 import GEMMA4
from jaxllm.parsers.reasoning.glm45 import GLM45
from jaxllm.parsers.reasoning.granite import GRANITE
from jaxllm.parsers.reasoning.hunyuan_a13b import HUNYUAN_A13B
from jaxllm.parsers.reasoning.hy_v3 import HY_V3
from jaxllm.parsers.reasoning.kimi_k2 import KIMI_K2
from jaxllm.parsers.reasoning.minimax_m2_append_think import MINIMAX_M2_APPEND_THINK
from jaxllm.parsers.reasoning.mistral import MISTRAL
from jaxllm.parsers.reasoning.olmo3 import OLMO3
from jaxllm.parsers.reasoning.openai_gptoss import OPENAI_GPTOSS
from jaxllm.parsers.reasoning.qwen3 import QWEN3
from jaxllm.parsers.reasoning.seed_oss import SEED_OSS
from jaxllm.parsers.stream_parser import StreamParser

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "cohere_command3": COHERE_COMMAND3,
    "deepseek_r1": DEEPSEEK_R1,
    "deepseek_v3": DEEPSEEK_V3,
    "ernie45": ERNIE45,
    "gemma4": GEMMA4,
    "glm45": GLM45,
    "glm47": GLM45,
    "granite": GRANITE,
    "hunyuan_a13b": HUNYUAN_A13B,
    "hy_v3": HY_V3,
    "kimi_k2": KIMI_K2,
    "mimo": QWEN3,
    "minimax_m2": DEEPSEEK_R1,
    "minimax_m2_append_think": MINIMAX_M2_APPEND_THINK,
    "mistral": MISTRAL,
    "nemotron_v3": DEEPSEEK_R1,
    "olmo3": OLMO3,
    "openai_gptoss": OPENAI_GPTOSS,
    "qwen3": QWEN3,
    "seed_oss": SEED_OSS,
    "step3": DEEPSEEK_R1,
    "step3p5": DEEPSEEK_R1,
}


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
