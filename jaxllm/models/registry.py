"""Maps an architecture of a config.json to the family that reads it and the class that runs it.

Users can add both. This module does not import jax; a family is imported when it is resolved.
"""

import importlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.errors import UnsupportedModelError

if TYPE_CHECKING:
    from jaxllm.models.base import Model
    from jaxllm.models.family import Family

# Architecture, as config.json names it -> file in `jaxllm.models.families`.
_FAMILIES = {
    "BambaForCausalLM": "bamba",
    "Cohere2ForCausalLM": "cohere2",
    "CohereForCausalLM": "cohere",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "Exaone4ForCausalLM": "exaone4",
    "FalconH1ForCausalLM": "falcon_h1",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GlmForCausalLM": "glm",
    "GlmMoeDsaForCausalLM": "deepseek_v32",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "GraniteSWAForCausalLM": "granite_swa",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "KimiLinearForCausalLM": "kimi_linear",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "LlamaForCausalLM": "llama",
    "LlavaForConditionalGeneration": "mistral3",
    "Mamba2ForCausalLM": "mamba2",
    "MiMoV2FlashForCausalLM": "mimo_v2",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Ministral3ForCausalLM": "mistral3",
    "Mistral3ForConditionalGeneration": "mistral3",
    "Mistral4ForCausalLM": "mistral4",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "NemotronForCausalLM": "nemotron",
    "NemotronHForCausalLM": "nemotron_h",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "OlmoeForCausalLM": "olmoe",
    "OlmoForCausalLM": "olmo",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3VLForConditionalGeneration": "qwen3",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
}
# Likewise, of models that only an engine that pools can run.
_ENCODERS = {
    **{f"Bert{head}": "bert" for head in ("Model", "ForMaskedLM", "ForSequenceClassification")},
    **{
        f"ModernBert{head}": "modernbert"
        for head in ("Model", "ForMaskedLM", "ForSequenceClassification")
    },
    **{
        f"{model}{head}": "roberta"
        for model in ("Roberta", "XLMRoberta")
        for head in ("Model", "ForMaskedLM", "ForSequenceClassification")
    },
}
# Likewise, of models that put a tower before decoders of other families.
_AROUND = {"InternVLForConditionalGeneration": "internvl"}
_ALL = _FAMILIES | _ENCODERS | _AROUND
_WITHOUT_HEAD = re.compile(r"(ForProcessRewardModel|(Text)?Model|ForSequenceClassification)$")
_DECODER = "jaxllm.models.decoder:DecoderForCausalLM"
_DEFAULT_FAMILY = "jaxllm.models.families.llama:FAMILY"


class ModelRegistry:
    """Architectures that can be run."""

    _families: dict[str, "Family | str"] = {
        name: f"jaxllm.models.families.{file}:FAMILY" for name, file in _ALL.items()
    }
    _classes: dict[str, type | str] = dict.fromkeys(_ALL, _DECODER)

    @classmethod
    def register_model(
        cls, name: str, model: type | str = _DECODER, *, family: "Family | str | None" = None
    ) -> None:
        """Run the architecture `name` with a class, or with "module:Class", imported when needed.

        The class is a `jaxllm.models.base.Model`. The family, an object or "module:OBJECT", reads
        the config.json. Without one the name keeps its family, and a new name gets Llama's. A model
        finds fields that the family does not read in `Architecture.hf_config`. A name that is
        registered already is replaced.
        """
        for given in (model, family):
            if isinstance(given, str) and len(given.split(":")) != 2:
                raise ValueError(f"model {given!r} must be a class or have the form 'module:Class'")
        cls._classes[name] = model
        cls._families[name] = family or cls._families.get(name, _DEFAULT_FAMILY)

    @classmethod
    def names(cls) -> list[str]:
        """All architectures that can be run."""
        return sorted(cls._classes)

    @classmethod
    def select(cls, architectures: Sequence[str], *, pools: bool = False) -> str:
        """The first of a config's architectures that can be run. An engine that pools also runs
        those of a decoder's body, with a classifier or without a head."""
        for name in architectures:
            if name in cls._classes:
                return name
            if pools and (generating := _WITHOUT_HEAD.sub("ForCausalLM", name)) in cls._classes:
                return generating
        asked = ", ".join(architectures) or "(config.json names none)"
        raise UnsupportedModelError(
            f"architecture {asked:.200} is not supported; supported are {', '.join(cls.names())}; "
            "others can be added with ModelRegistry.register_model"
        )

    @classmethod
    def resolve(cls, architectures: Sequence[str]) -> "type[Model]":
        """The class that runs the first supported one of a config's architectures."""
        return _resolve(cls._classes[cls.select(architectures)])

    @classmethod
    def has_own_class(cls, name: str) -> bool:
        """Whether a user's class runs the architecture. It may read any field of the config."""
        return cls._classes[name] != _DECODER

    @classmethod
    def family(cls, name: str) -> "Family":
        """The family of an architecture that can be run."""
        return _resolve(cls._families[name])


def family_names() -> list[str]:
    """The families of the package that have a decoder of their own, which generates text."""
    return sorted(set(_FAMILIES.values()))


def encoder_names() -> list[str]:
    """The families of the package that only an engine that pools can run."""
    return sorted(set(_ENCODERS.values()))


def around_names() -> list[str]:
    """The families of the package whose decoders are of other families."""
    return sorted(set(_AROUND.values()))


def architectures_of(family: str) -> list[str]:
    """The architectures that a family of the package reads."""
    return [name for name, file in _ALL.items() if file == family]


def load_family(name: str) -> "Family":
    """A family of the package."""
    return _resolve(f"jaxllm.models.families.{name}:FAMILY")


def _resolve(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    module, _, name = given.partition(":")
    return getattr(importlib.import_module(module), name)
