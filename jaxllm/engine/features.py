"""The features of an engine, their host halves; `runner.features` names those of the device."""

from jaxllm.config import EngineConfig
from jaxllm.prompt_logprobs.host import PromptLogprobs
from jaxllm.scheduler.features import Feature


def host_features(config: EngineConfig) -> tuple[Feature, ...]:
    """Those of an engine with this config, new ones: they keep what they know of its requests."""
    return (PromptLogprobs(),)
