"""The host halves of an engine's features. `runner.features` has their device halves."""

from typing import Protocol

from jaxllm.config import EngineConfig
from jaxllm.handover.host import TakingOver
from jaxllm.lora.host import Adapters
from jaxllm.lora.shelf import Shelf
from jaxllm.media.host import Images
from jaxllm.messages import EngineInfo
from jaxllm.pooling.host import RowPooling, TokenPooling
from jaxllm.prompt_embeds.host import PromptEmbeds
from jaxllm.prompt_logprobs.host import PromptLogprobs
from jaxllm.scheduler.features import Feature
from jaxllm.scheduler.kv.manager import KVCacheManager
from jaxllm.structured_output.host import StructuredOutput
from jaxllm.structured_output.vocabulary import load_vocabulary


def host_features(info: EngineInfo, kv: KVCacheManager) -> tuple[Feature, ...]:
    """Make the features of such an engine. They keep state of its requests, so every engine needs
    its own."""
    if info.hand_over is not None and info.hand_over.takes:
        return (*_of_steps(info), TakingOver(kv))
    return _of_steps(info)


def _of_steps(info: EngineInfo) -> tuple[Feature, ...]:
    if info.pooling is not None:
        return (RowPooling(info.pooling.needs_whole_prompts), TokenPooling())
    features: list[Feature] = []
    if info.images is not None:
        # First, since its limit counts tokens from the end of those that are wanted.
        features.append(Images(info.images, info.num_image_rows))
    if info.embeds is not None:
        features.append(PromptEmbeds(info.embeds))
    return (*features, PromptLogprobs())


def structured_output(config: EngineConfig, info: EngineInfo) -> StructuredOutput:
    """Make the feature whose rows sample late. It is not in the list above: it has no device half,
    and the engine core asks it for masks."""
    return StructuredOutput(lambda: load_vocabulary(config.model, info), info.vocab_size)


class HasShelf(Protocol):
    """What fetches adapters for the devices."""

    def shelf(self) -> Shelf: ...


def adapters(config: EngineConfig, info: EngineInfo, executor: HasShelf) -> Adapters | None:
    """Make the feature whose requests need slots of their own; None: the engine has no adapters."""
    if info.adapters is None:
        return None
    num_slots, num_kept = info.adapters.max_loras, config.lora.num_kept
    return Adapters(executor.shelf(), num_slots=num_slots, num_kept=num_kept)
