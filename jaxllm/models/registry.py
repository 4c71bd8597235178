"""Which class runs which architecture of a config.json; open to classes from outside the package.

No jax here, neither directly nor through the models: they are imported when they are resolved.
"""

import importlib
from collections.abc import Sequence

from jaxllm.errors import UnsupportedModelError


class ModelRegistry:
    """Architecture names, as config.json has them, and the classes that run them."""

    _classes: dict[str, type | str] = {
        "LlamaForCausalLM": "jaxllm.models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "jaxllm.models.mistral:MistralForCausalLM",
        "Qwen2ForCausalLM": "jaxllm.models.qwen2:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "jaxllm.models.qwen3:Qwen3ForCausalLM",
    }

    @classmethod
    def register_model(cls, name: str, model: type | str) -> None:
        """Run the architecture `name` with a class, or with "module:Class", imported when needed.

        The class is a `jaxllm.models.decoder.DecoderForCausalLM` or offers what that one does. Its
        config.json is read as Llama's; what a model wants to know beyond that it finds in
        `Architecture.hf_config`. A name that exists is replaced.
        """
        if isinstance(model, str) and len(model.split(":")) != 2:
            raise ValueError(f"model {model!r} must be a class or have the form 'module:Class'")
        cls._classes[name] = model

    @classmethod
    def names(cls) -> list[str]:
        """All architectures that can be run."""
        return sorted(cls._classes)

    @classmethod
    def select(cls, architectures: Sequence[str]) -> str:
        """The first of a config's architectures that can be run."""
        for name in architectures:
            if name in cls._classes:
                return name
        asked = ", ".join(architectures) or "(config.json names none)"
        raise UnsupportedModelError(
            f"architecture {asked:.200} is not supported; supported are {', '.join(cls.names())}; "
            "others can be added with ModelRegistry.register_model"
        )

    @classmethod
    def resolve(cls, architectures: Sequence[str]) -> type:
        """The class that runs the first supported one of a config's architectures."""
        model = cls._classes[cls.select(architectures)]
        if isinstance(model, str):
            module, _, name = model.partition(":")
            model = getattr(importlib.import_module(module), name)
        assert isinstance(model, type), model
        return model
