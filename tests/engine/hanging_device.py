"""A device that hangs while a file exists. Engines load it as the logits processor
hanging_device:HangingDevice."""

import os
import time
from pathlib import Path

import jax

from jaxllm import LogitsProcessor

# The path of that file.
VARIABLE = "HANGS_WHILE_EXISTS"


class HangingDevice(LogitsProcessor):
    num_params = 1

    def encode(self, params):
        return [0.0]

    def apply(self, logits, params, output_index):
        return jax.pure_callback(_answer, logits, logits)


def _answer(logits):
    while Path(os.environ[VARIABLE]).exists():
        time.sleep(0.1)
    return logits
