"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a sliding window in some layers."""

from jaxllm.models.checkpoint_names import DECODER_NAMES
from jaxllm.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    """The biases are in `Architecture.qkv_bias`, the windows in `Architecture.layer_windows`."""

    checkpoint_names = DECODER_NAMES
