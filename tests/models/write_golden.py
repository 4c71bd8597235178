"""Rewrites the figures in golden.json from transformers: `python tests/models/write_golden.py`.

The cases are in the same file: edit `family`, `seed`, `config` or `prompt_len` there, or add a case
without figures, then run this with torch installed.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from jaxllm.files import read_json
from jaxllm.testing import make_tiny_checkpoint

GOLDEN = Path(__file__).with_name("golden.json")
PROMPT_LEN = 40  # of cases that do not say another; those with states exceed a tile


def figures(case: dict) -> dict:
    num_tokens = case.get("prompt_len", PROMPT_LEN)
    prompt = np.random.default_rng(case["seed"]).integers(3, 384, num_tokens).tolist()
    with tempfile.TemporaryDirectory() as path:
        make_tiny_checkpoint(path, case["family"], seed=case["seed"], **case["config"])
        # Not every decoder has an auto class.
        (name,) = read_json(Path(path) / "config.json")["architectures"]
        model = getattr(transformers, name).from_pretrained(
            path, dtype="float32", attn_implementation="eager"
        )
    with torch.no_grad():
        # A cache would need a layer with attention.
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits, -1)[torch.arange(num_tokens - 1), prompt[1:]]
    return {
        "prompt": prompt,
        "prompt_logprobs": np.round(logprobs.numpy().astype(float), 5).tolist(),
        "last_logits": np.round(logits[-1, :12].numpy().astype(float), 5).tolist(),
    }


def main() -> None:
    cases = json.loads(GOLDEN.read_text())
    lines = []
    for name, case in cases.items():
        case.update(figures(case))
        fields = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in case.items()]
        lines.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(fields) + "\n  }")
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
