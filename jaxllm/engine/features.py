"""The host halves of an engine's features. `runner.features` has their device halves."""

from jaxllm.config import EngineConfig
from jaxllm.prompt_logprobs.host import PromptLogprobs
from jaxllm.scheduler.features import Feature


def host_features(config: EngineConfig) -> tuple[Feature, ...]:
    """Make the features of an engine with this config. They keep state of its requests, so every
    engine needs its own."""
    return (PromptLogprobs(),)
