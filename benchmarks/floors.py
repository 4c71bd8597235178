"""The least time of a decode, a prompt or a whole batch on a device with given ceilings.

A model's config.json determines its bytes and operations, so floors are the same for every engine.
The ceilings are measured rates of a device, not those of its data sheet, so a share near 1 is
possible.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from jaxllm.programs.roofline import Roofline, Window


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
    """The roofline of a dense decoder with Llama's layers; the head is always a matrix."""
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
        windows=(
            Window(
                size=0,
                bytes_per_token=layers * 2 * kv_heads * head_size * item_size,
                flops_per_attended=layers * 4 * heads * head_size,
            ),
        ),
    )


def decode_s(line: Roofline, batch: int, context: float) -> float:
    """The time of a step that decodes one token for each request of a batch."""
    num_bytes, num_flops = line.attention(1, context)
    return line.bound(batch, batch, (batch * num_bytes, batch * num_flops)).seconds


def prefill_s(line: Roofline, tokens: int) -> float:
    """The time of a prompt alone in one step."""
    return line.bound(tokens, 1, line.attention(tokens, tokens)).seconds


def serial_s(line: Roofline, batch: int, prompt: int, answer: int) -> float:
    """The serial model of a saturated engine: a batch of equal requests. First it computes all
    prompts one after the other, and then the decodes."""
    decodes = answer * decode_s(line, batch, prompt + answer / 2)
    return batch * prefill_s(line, prompt) + decodes
