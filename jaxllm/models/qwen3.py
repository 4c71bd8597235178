"""Qwen3: Llama with a norm on every query and key head, and head_dim apart from hidden_size."""

from jaxllm.models.checkpoint_names import DECODER_NAMES
from jaxllm.models.decoder import DecoderForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    """The norms (`q_norm`, `k_norm` in the attention) come with `Architecture.qk_norm`."""

    checkpoint_names = DECODER_NAMES
