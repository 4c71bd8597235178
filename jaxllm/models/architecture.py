"""Reads a config.json into a frozen `Architecture`, by the family that the config names.

The plan reads it before anything is loaded, so an unsupported model is refused here, by name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import UnsupportedModelError
from jaxllm.layers.attention import AttentionSpec
from jaxllm.models.harmless import HARMLESS, OF_POOLING
from jaxllm.models.hf_config import HFConfig, merge_overrides
from jaxllm.models.registry import ModelRegistry
from jaxllm.models.seeing_all import seeing_all, without_both_sides
from jaxllm.models.specs import Architecture, MixerSpec
from jaxllm.quantization.read import read_scheme

# The field of a config.json that describes a tower for images.
VISION = "vision_config"


def read_architecture(
    hf_config: Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
    quantization: str | None = None,
    pools: bool = False,
    sees_images: bool = False,
) -> Architecture:
    """Read the contents of a config.json.

    Args:
      overrides: replace some of its fields.
      max_model_len: the longest sequence that the user asks for, on which some rotary embeddings
        depend. None: the longest that the config allows.
      quantization: the codes that weights of 16 bits become, or the method of a checkpoint that has
        codes. None: as the checkpoint.
      pools: whether the engine pools, so that the model may have no head or that of a classifier.
      sees_images: whether to read the tower for images beside the decoder, if the model has one.
    """
    config = HFConfig(merge_overrides(hf_config, overrides or {}), max_model_len=max_model_len)
    name = ModelRegistry.select(config.names("architectures") or (), pools=pools)
    reach = None
    if pools:
        config, reach = without_both_sides(config)
    config.refuse_unsupported()
    has_own_class = ModelRegistry.has_own_class(name)
    scheme = read_scheme(config.quantization, quantization)
    if scheme is not None and has_own_class:
        raise UnsupportedModelError(
            f"{name} runs by a class of its own, which is not supported with quantisation"
        )
    family = ModelRegistry.family(name)
    if family.is_encoder and not pools:
        raise UnsupportedModelError(
            f"{name} is an encoder, which generates no text; start the engine with runner='pooling'"
        )
    architecture = family.read(name, config)
    if sees_images and family.tower is not None and config.get(VISION) is not None:
        architecture = dataclasses.replace(architecture, tower=family.tower(config, architecture))
    if not has_own_class:
        of_pooling = OF_POOLING if pools else ()
        config.refuse_unread({*HARMLESS, *family.harmless, *of_pooling})
    if reach is not None and not family.is_encoder:
        architecture = seeing_all(architecture, reach)
    architecture = dataclasses.replace(architecture, scheme=scheme)
    return _without_wide_windows(architecture, max_model_len or architecture.max_model_len)


def _without_wide_windows(architecture: Architecture, max_model_len: int) -> Architecture:
    """The same computation without the windows and chunks that hold the longest sequence: their
    layers need no cache of their own kind."""

    if architecture.tower is not None and architecture.tower.seeing == "image_in_windows":
        return architecture  # these layers differ from the others also where all fits

    def narrowed(mixer: MixerSpec) -> MixerSpec:
        if not isinstance(mixer, AttentionSpec):
            return mixer
        window, chunk = (
            size if size is not None and size < max_model_len else None
            for size in (mixer.window, mixer.chunk)
        )
        return dataclasses.replace(mixer, window=window, chunk=chunk)

    layers = tuple(
        dataclasses.replace(layer, mixers=tuple(map(narrowed, layer.mixers)))
        for layer in architecture.layers
    )
    return dataclasses.replace(architecture, layers=layers)
