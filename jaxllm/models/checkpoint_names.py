"""How the parameters of a model are named in its checkpoints."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class CheckpointNames:
    """An exact map from parameters to checkpoint tensors.

    Our modules are named as in the checkpoint, so a parameter is the tensor of the same name,
    unless its module was fused out of several.
    """

    # Fused module -> the modules in the checkpoint, in the order in which they are concatenated.
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Patterns of whole names that checkpoints carry and nobody needs.
    ignored: tuple[str, ...] = ()
    # Tensors that repeat a parameter: name in the checkpoint -> parameter. They must be equal to
    # it, and are used where the model has a parameter of that name.
    copies: Mapping[str, str] = field(default_factory=dict)

    def sources(self, parameter: str) -> tuple[str, ...]:
        """The tensors that, concatenated on axis 0, make the parameter."""
        head, _, leaf = parameter.rpartition(".")
        parent, _, module = head.rpartition(".")
        if module not in self.fused:
            return (parameter,)
        return tuple(f"{parent}.{part}.{leaf}" for part in self.fused[module])

    def is_ignored(self, tensor: str) -> bool:
        return any(re.fullmatch(pattern, tensor) for pattern in self.ignored)


# Llama's names, which most decoders took over.
DECODER_NAMES = CheckpointNames(
    fused={
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    },
    # Computed from the config; written by transformers before 4.32.
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    # Some checkpoints with tied embeddings have the head as well.
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)
