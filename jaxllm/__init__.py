"""LLM inference on JAX/XLA. The public names are loaded at their first use."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

# name -> module. To import jaxllm itself loads neither jax nor transformers.
_PUBLIC = {
    "LLM": "jaxllm.llm",
    "LLMEngine": "jaxllm.frontend.llm_engine",
    "AsyncLLMEngine": "jaxllm.frontend.async_llm_engine",
    "EngineArgs": "jaxllm.config",
    "EngineConfig": "jaxllm.config",
    "SamplingParams": "jaxllm.sampling_params",
    "BeamSearchParams": "jaxllm.sampling_params",
    "PoolingParams": "jaxllm.pooling_params",
    "PoolerConfig": "jaxllm.pooler_config",
    "RequestOutputKind": "jaxllm.sampling_params",
    "StructuredOutputsParams": "jaxllm.sampling_params",
    "ModelRegistry": "jaxllm.models.registry",
    "LogitsProcessor": "jaxllm.sampling.logits_processor",
    "AnswerFormat": "jaxllm.parsers.answer_format",
    "SchedulingPolicy": "jaxllm.scheduler.policy",
    "register_scheduling_policy": "jaxllm.scheduler.policy",
    "RequestOutput": "jaxllm.outputs",
    "CompletionOutput": "jaxllm.outputs",
    "Logprob": "jaxllm.outputs",
    "RequestStateStats": "jaxllm.outputs",
    "PoolingRequestOutput": "jaxllm.outputs",
    "PoolingOutput": "jaxllm.outputs",
    "EmbeddingRequestOutput": "jaxllm.outputs",
    "EmbeddingOutput": "jaxllm.outputs",
    "ClassificationRequestOutput": "jaxllm.outputs",
    "ClassificationOutput": "jaxllm.outputs",
    "ScoringRequestOutput": "jaxllm.outputs",
    "ScoringOutput": "jaxllm.outputs",
    "BeamSearchOutput": "jaxllm.outputs",
    "BeamSearchSequence": "jaxllm.outputs",
    "LoRARequest": "jaxllm.lora.request",
    "TextPrompt": "jaxllm.prompts",
    "TokensPrompt": "jaxllm.prompts",
    "EmbedsPrompt": "jaxllm.prompts",
    "PromptType": "jaxllm.prompts",
    "JaxLLMError": "jaxllm.errors",
    "ValidationError": "jaxllm.errors",
    "CheckpointError": "jaxllm.errors",
    "EngineDeadError": "jaxllm.errors",
    "OutOfMemoryError": "jaxllm.errors",
    "UnsupportedModelError": "jaxllm.errors",
}

__all__ = [*_PUBLIC, "__version__"]

if TYPE_CHECKING:
    from jaxllm.config import EngineArgs, EngineConfig
    from jaxllm.errors import (
        CheckpointError,
        EngineDeadError,
        JaxLLMError,
        OutOfMemoryError,
        UnsupportedModelError,
        ValidationError,
    )
    from jaxllm.frontend.async_llm_engine import AsyncLLMEngine
    from jaxllm.frontend.llm_engine import LLMEngine
    from jaxllm.llm import LLM
    from jaxllm.lora.request import LoRARequest
    from jaxllm.models.registry import ModelRegistry
    from jaxllm.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        RequestStateStats,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from jaxllm.parsers.answer_format import AnswerFormat
    from jaxllm.pooler_config import PoolerConfig
    from jaxllm.pooling_params import PoolingParams
    from jaxllm.prompts import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
    from jaxllm.sampling.logits_processor import LogitsProcessor
    from jaxllm.sampling_params import (
        BeamSearchParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from jaxllm.scheduler.policy import SchedulingPolicy, register_scheduling_policy


def __getattr__(name: str) -> object:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    import importlib

    from jaxllm.importing import without_collections

    with without_collections():
        return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return __all__
