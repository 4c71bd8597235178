"""The processors that are supported, each by the name of its class in transformers."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxllm.media.processors import gemma3, gemma4, internvl, pixtral, qwen
from jaxllm.media.processors.files import Files


class Processor(NamedTuple):
    """A family of processors."""

    read: Callable[[Files], dict[str, Any]]  # returns what it has of an ImageSpec
    # Whether pixels are normalised where preprocessor_config.json does not say so.
    normalises: bool = True


PROCESSORS = {
    "Gemma3ImageProcessor": Processor(gemma3.read),
    "Gemma4ImageProcessor": Processor(gemma4.read, normalises=False),
    "GotOcr2ImageProcessor": Processor(internvl.read),
    "PixtralImageProcessor": Processor(pixtral.read),
    "Qwen2VLImageProcessor": Processor(qwen.read),
}
