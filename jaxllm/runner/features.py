"""The features of an engine, their device halves; `engine.features` names those of the host."""

from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.prompt_logprobs.device import PromptLogprobs
from jaxllm.runner.slices import DeviceSlice


def device_features(plan: EnginePlan) -> tuple[DeviceSlice, ...]:
    """Those that the plan's programs have."""
    return (PromptLogprobs(plan.step_logprobs),)
