"""Reads a config.json into a frozen `Architecture`, by the family that the config names.

The plan reads it before anything is loaded, so an unsupported model is refused here, by name.
"""

from collections.abc import Mapping
from typing import Any

from jaxllm.models.harmless import HARMLESS
from jaxllm.models.hf_config import HFConfig, merge_overrides
from jaxllm.models.registry import ModelRegistry
from jaxllm.models.specs import Architecture


def read_architecture(
    hf_config: Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
) -> Architecture:
    """Read the contents of a config.json.

    Args:
      overrides: replace some of its fields.
      max_model_len: the longest sequence that the user asks for, on which some rotary embeddings
        depend. None: the longest that the config allows.
    """
    config = HFConfig(merge_overrides(hf_config, overrides or {}), max_model_len=max_model_len)
    name = ModelRegistry.select(config.names("architectures") or ())
    config.refuse_unsupported()
    family = ModelRegistry.family(name)
    architecture = family.read(name, config)
    if not ModelRegistry.has_own_class(name):
        config.refuse_unread(HARMLESS.keys() | family.harmless)
    return architecture
