"""The device halves of an engine's features. `engine.features` has their host halves."""

from jaxllm.media.device import Images
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.pooling.device import TokenPooling
from jaxllm.prompt_logprobs.device import PromptLogprobs
from jaxllm.runner.slices import DeviceSlice


def device_features(plan: EnginePlan) -> tuple[DeviceSlice, ...]:
    """Return the features that the plan's programs have."""
    if plan.pooling is not None:
        return (TokenPooling(),)
    prompt_logprobs = PromptLogprobs(plan.step_logprobs, plan.sampling)
    if plan.images is None:
        return (prompt_logprobs,)
    return (Images(plan.images.spec), prompt_logprobs)
