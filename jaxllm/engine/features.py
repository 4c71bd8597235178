"""The host halves of an engine's features. `runner.features` has their device halves."""

from jaxllm.config import EngineConfig
from jaxllm.messages import EngineInfo
from jaxllm.pooling.host import RowPooling, TokenPooling
from jaxllm.prompt_logprobs.host import PromptLogprobs
from jaxllm.scheduler.features import Feature
from jaxllm.structured_output.host import StructuredOutput
from jaxllm.structured_output.vocabulary import load_vocabulary


def host_features(info: EngineInfo) -> tuple[Feature, ...]:
    """Make the features of such an engine. They keep state of its requests, so every engine needs
    its own."""
    if info.pooling is not None:
        return (RowPooling(info.pooling.needs_whole_prompts), TokenPooling())
    return (PromptLogprobs(),)


def structured_output(config: EngineConfig, info: EngineInfo) -> StructuredOutput:
    """Make the feature whose rows sample late. It is not in the list above: it has no device half,
    and the engine core asks it for masks."""
    return StructuredOutput(lambda: load_vocabulary(config.model, info), info.vocab_size)
