"""Tokens per step of requests with a grammar, by what drafts for them: counted, not timed.

    python benchmarks/forms.py

Each request runs alone. Without drafts a step brings more than a token where the grammar forces
what follows. `itself` is the model as its own draft, of which only the grammar refuses drafts: the
most that a draft model can bring. Texts with drafts are compared with those without.
"""

import argparse
from typing import Any

from jaxllm import LLM, SamplingParams, StructuredOutputsParams

PROMPTS = [
    "def parse(line):\n    return json.loads(line)\n\n# described as JSON:\n",
    "class Cache:\n    def get(self, key):\n        return self._data[key]\n\nDESCRIPTION = ",
    "# The signature of the function as an object:\n",
    "def area(width, height):\n    return width * height\n\nprint(json.dumps(",
]
_ARGUMENT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "type": {"enum": ["int", "str", "float", "bool", "list"]},
    },
    "required": ["name", "type"],
    "additionalProperties": False,
}
# Much of it is forced.
FIELDS = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "module": {"enum": ["numpy", "os", "sys", "json", "collections"]},
        "summary": {"type": "string", "maxLength": 80},
        "line_number": {"type": "integer", "minimum": 1, "maximum": 999},
        "is_public": {"type": "boolean"},
        "arguments": {"type": "array", "maxItems": 3, "items": _ARGUMENT},
    },
    "required": ["name", "module", "summary", "line_number", "is_public", "arguments"],
    "additionalProperties": False,
}
# Little of it is.
TEXT = {
    "type": "object",
    "properties": {"code": {"type": "string", "minLength": 120, "maxLength": 240}},
    "required": ["code"],
    "additionalProperties": False,
}
FORMS = {
    "a schema of six fields": StructuredOutputsParams(json=FIELDS),
    "a schema of one text": StructuredOutputsParams(json=TEXT),
    "a regex of Python": StructuredOutputsParams(
        regex=r"def [a-z_]{3,12}\(self\):\n    return self\.[a-z_]{3,12}\n\n(    .*\n)*"
    ),
}
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram"},
    "bundled-draft": {"model": "bundled-draft"},
    "itself": {"model": "bundled"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=200)
    args = parser.parse_args()
    texts: dict[tuple[str, int], list[str]] = {}
    print("| drafter | form | temperature | tokens | steps | per step | drafts | right |")
    print("|---|---|---|---|---|---|---|---|")
    for name, fields in DRAFTERS.items():
        its = None if fields is None else fields | {"num_speculative_tokens": args.drafts}
        llm = LLM(
            "bundled",
            dtype="float32",
            max_model_len=512,
            max_num_seqs=4,
            enforce_eager=True,
            enable_prefix_caching=False,
            async_scheduling=False,  # so that no step is dispatched in vain at an end
            speculative_config=its,
        )
        for form, params in FORMS.items():
            for temperature in (0, 1):
                said, figures = run(llm, params, temperature, args.max_tokens)
                assert texts.setdefault((form, temperature), said) == said, "the texts differ"
                print(f"| {name} | {form} | {temperature} | {figures} |", flush=True)


def run(
    llm: LLM, form: StructuredOutputsParams, temperature: int, max_tokens: int
) -> tuple[list[str], str]:
    """The texts of all prompts, and the figures."""
    before = llm.llm_engine.stats()
    outputs = [
        llm.generate(
            [prompt],
            SamplingParams(
                temperature=temperature, seed=seed, max_tokens=max_tokens, structured_outputs=form
            ),
            use_tqdm=False,
        )[0].outputs[0]
        for seed, prompt in enumerate(PROMPTS)
    ]
    after = llm.llm_engine.stats()
    tokens = sum(len(output.token_ids) for output in outputs)
    steps, drafts, right = (
        getattr(after, name) - getattr(before, name)
        for name in ("num_steps", "num_draft_tokens", "num_accepted_tokens")
    )
    share = f"{right / drafts:.2f}" if drafts else "-"
    figures = f"{tokens} | {steps} | {tokens / steps:.2f} | {drafts} | {share}"
    return [output.text for output in outputs], figures


if __name__ == "__main__":
    main()
