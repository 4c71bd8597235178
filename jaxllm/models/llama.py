"""Llama 2, 3, 3.1 and all that keep its architecture: the plain dense decoder."""

from jaxllm.models.checkpoint_names import DECODER_NAMES
from jaxllm.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """Biases on all projections or on none; any rope scaling."""

    checkpoint_names = DECODER_NAMES
