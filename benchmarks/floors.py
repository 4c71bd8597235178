"""The least time that a decode, a prompt or a whole batch can take on a device with given ceilings.

What a model reads and computes follows from its config.json alone, so floors are the same for every
engine. The ceilings are rates that a device was seen to reach, not those of its data sheet: a share
of 1 can be come near to.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from jaxllm.programs.roofline import Roofline


def add_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ceilings",
        type=ceilings,
        metavar="BYTES/S,FLOP/S",
        help="what the device reaches, such as 4.3e12,790e12 on an H200",
    )


def ceilings(text: str) -> tuple[float, float]:
    num_bytes, num_flops = map(float, text.split(","))
    return num_bytes, num_flops


def of_llama(config: Mapping[str, Any], dtype: str, rates: tuple[float, float]) -> Roofline:
    """Of a dense decoder with Llama's layers, whose head is a matrix in any case."""
    hidden, item_size = config["hidden_size"], {"bfloat16": 2, "float32": 4}[dtype]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim") or hidden // heads
    layers = config["num_hidden_layers"]
    attention = hidden * head_size * 2 * (heads + kv_heads)
    matrices = layers * (attention + 3 * hidden * config["intermediate_size"])
    head = config["vocab_size"] * hidden
    return Roofline(
        bytes_per_second=rates[0],
        flops_per_second=rates[1],
        bytes_per_step=(matrices + head) * item_size,
        flops_per_token=2 * matrices,
        flops_per_row=2 * head,
        kv_bytes_per_token=2 * kv_heads * head_size * item_size,
        flops_per_attended=4 * heads * head_size,
        layers_by_window=((0, layers),),
    )


def decode_s(line: Roofline, batch: int, context: float) -> float:
    """A step in which each request of a batch gets a token."""
    num_bytes, num_flops = line.attention(1, context)
    return line.bound(batch, batch, (batch * num_bytes, batch * num_flops)).seconds


def prefill_s(line: Roofline, tokens: int) -> float:
    """A prompt in one step, with nothing else in it."""
    return line.bound(tokens, 1, line.attention(tokens, tokens)).seconds


def serial_s(line: Roofline, batch: int, prompt: int, answer: int) -> float:
    """The serial model of a saturated engine: a batch of equal requests, all their prompts first,
    one after the other, and then their decodes."""
    decodes = answer * decode_s(line, batch, prompt + answer / 2)
    return batch * prefill_s(line, prompt) + decodes
