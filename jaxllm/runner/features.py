"""The device halves of an engine's features. `engine.features` has their host halves."""

from jaxllm.media.device import Images
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.pooling.device import TokenPooling
from jaxllm.prompt_embeds.device import PromptEmbeds
from jaxllm.prompt_logprobs.device import PromptLogprobs
from jaxllm.runner.slices import DeviceSlice


def device_features(plan: EnginePlan) -> tuple[DeviceSlice, ...]:
    """Return the features that the plan's programs have."""
    if plan.pooling is not None:
        return (TokenPooling(),)
    features: list[DeviceSlice] = []
    if plan.images is not None:
        features.append(Images(plan.images.spec))
    if plan.embeds is not None:
        features.append(PromptEmbeds())
    return (*features, PromptLogprobs(plan.step_logprobs, plan.sampling))
