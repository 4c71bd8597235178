"""Rewrites the tokens in golden.json from transformers: `python tests/engine/write_golden.py`.

The cases are in the same file: edit `family`, `seed` or `config` there, or add a case without
tokens, then run this with torch installed. A case with a near tie between tokens is refused; give
it another seed.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from jaxllm.testing import VOCAB_SIZE, make_tiny_checkpoint

GOLDEN = Path(__file__).with_name("golden.json")
# Their sum exceeds a step of the test, so that the longest prompt is computed in chunks.
PROMPT_LENS = [3, 17, 33, 60]
NUM_TOKENS = 24
SMALLEST_MARGIN = 1e-3


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    inputs = torch.tensor([prompt])
    ids = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        min_new_tokens=NUM_TOKENS,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=None,
    )[0]
    with torch.no_grad():
        best = model(ids[None]).logits[0, len(prompt) - 1 : -1].topk(2).values
    margin = (best[:, 0] - best[:, 1]).min().item()
    assert margin > SMALLEST_MARGIN, f"margin {margin:.1e} with a prompt of {len(prompt)} tokens"
    return ids[len(prompt) :].tolist()


def answers(case: dict) -> dict:
    rng = np.random.default_rng(case["seed"])
    prompts = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in PROMPT_LENS]
    with tempfile.TemporaryDirectory() as path:
        make_tiny_checkpoint(path, case["family"], seed=case["seed"], **case["config"])
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype="float32", attn_implementation="eager"
        )
    return {"prompts": prompts, "tokens": [greedy(model, prompt) for prompt in prompts]}


def main() -> None:
    cases = json.loads(GOLDEN.read_text())
    lines = []
    for name, case in cases.items():
        case.update(answers(case))
        fields = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in case.items()]
        lines.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(fields) + "\n  }")
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
