"""Mistral: Llama with a sliding window in every layer."""

from jaxllm.models.checkpoint_names import DECODER_NAMES
from jaxllm.models.decoder import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    """No biases; the window is in `Architecture.layer_windows`."""

    checkpoint_names = DECODER_NAMES
