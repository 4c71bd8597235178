"""Output tokens per second with speculative decoding, over those without, in one run.

    python benchmarks/speculation.py [--config '{"method": "ngram"}'] [--batches 1 8 32]

The model is the bundled one, and the texts are sources of jaxllm, which it has not been trained on.

- greedy, sampled: the model goes on from the head of a file, at temperature 0 and 1.
- written: the same, and the answer is what the file has there, whatever the model would write.
- editing: the prompt is a part of a file, and the answer is this part with a tenth of its lines
  replaced by lines of other files.

What a model or a head drafts goes on from its own logits, so only the first two are for it.

A logits processor makes answers what they are said to be, with and without speculation. Both
engines are in this process. They take turns, with the same requests, so other load on the machine
affects both alike; the medians of all rounds are compared. The ratio of CPU seconds tells what is
left of it on a machine that is in use.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxllm
from jaxllm import LLM, SamplingParams
from jaxllm.sampling.logits_processor import LogitsProcessor

LONGEST = 256  # tokens of an answer
NUM_TEXTS = 64
FORCED = np.zeros((NUM_TEXTS, LONGEST), np.int32)  # filled in before an engine is made


class Forces(LogitsProcessor):
    """Lets a request have no answer but one of the table's."""

    num_params = 1

    def encode(self, params: SamplingParams) -> tuple[float, ...] | None:
        index = (params.extra_args or {}).get("text")
        return None if index is None else (float(index),)

    def apply(self, logits: jax.Array, params: jax.Array, output_index: jax.Array) -> jax.Array:
        table = jnp.asarray(FORCED)
        wanted = table[params[:, 0].astype(jnp.int32), jnp.clip(output_index, 0, LONGEST - 1)]
        return logits.at[jnp.arange(len(logits)), wanted].set(1e4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=json.loads, default={"method": "ngram"})
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--kinds", nargs="+", default=["greedy", "sampled", "written", "editing"])
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    if args.config.get("method") not in ("ngram", "custom_class"):
        # It would be forced to the same answer, and be right.
        args.kinds = [kind for kind in args.kinds if kind not in ("written", "editing")]

    # From the second round on, prompts are in the prefix cache, so that decoding is compared.
    options = {"max_num_seqs": max(args.batches)}
    plain = LLM(**options, enforce_eager=True)
    tokenizer = plain.get_tokenizer()
    files = sorted(Path(jaxllm.__file__).parent.rglob("*.py"))
    texts = [tokenizer.encode(p.read_text(), add_special_tokens=False) for p in files]
    parts = [t for t in texts if len(t) >= 256 + LONGEST][:NUM_TEXTS]
    rng = random.Random(0)
    edited = [edit(p.read_text(), texts, tokenizer, rng) for p in files]
    edited = [pair for pair in edited if len(pair[1]) >= LONGEST][: NUM_TEXTS // 2]
    for index, part in enumerate(parts[: NUM_TEXTS // 2]):
        FORCED[index] = part[256 : 256 + LONGEST]
    for index, (_, answer) in enumerate(edited):
        FORCED[NUM_TEXTS // 2 + index] = answer[:LONGEST]
    del plain
    options["logits_processors"] = (Forces,)
    options["enforce_eager"] = True  # the first round compiles
    plain = LLM(**options)
    drafting = LLM(**options, speculative_config=args.config)

    print(
        f"{'text':>8} {'requests':>8} {'tokens/s':>9} {'drafting':>9} {'ratio':>6} {'of CPU':>6}",
        end="",
    )
    print(f" {'tokens/step':>11} {'accepted':>8} {'rows with drafts':>16}")
    for kind in args.kinds:
        for batch in args.batches:
            prompts, params = requests(kind, batch, parts, edited, args.max_tokens)
            rates: dict[str, list[float]] = {"plain": [], "drafting": []}
            cpu: dict[str, list[float]] = {"plain": [], "drafting": []}
            before = drafting.llm_engine.stats()
            # The first rounds compile: one with the whole prompt, and one with a cached one.
            for turn in range(-2, args.rounds):
                if turn == 0:
                    before = drafting.llm_engine.stats()
                for name, llm in (("plain", plain), ("drafting", drafting)):
                    start, cpu_start = time.perf_counter(), time.process_time()
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                    seconds = time.perf_counter() - start
                    count = sum(len(output.outputs[0].token_ids) for output in outputs)
                    answers = [output.outputs[0].token_ids for output in outputs]
                    if name == "plain":
                        wanted = answers
                    elif answers != wanted:
                        differ = sum(a != w for a, w in zip(answers, wanted, strict=True))
                        print(f"{differ} of {len(answers)} answers differ")
                    if turn >= 0:
                        rates[name].append(count / seconds)
                        cpu[name].append(time.process_time() - cpu_start)
            after = drafting.llm_engine.stats()
            middle = {name: statistics.median(values) for name, values in rates.items()}
            ratios = [d / p for d, p in zip(rates["drafting"], rates["plain"], strict=True)]
            of_cpu = statistics.median(cpu["plain"]) / statistics.median(cpu["drafting"])
            drafted = after.num_draft_tokens - before.num_draft_tokens
            accepted = after.num_accepted_tokens - before.num_accepted_tokens
            rows = after.num_drafts - before.num_drafts
            generated = after.num_generation_tokens - before.num_generation_tokens
            all_rows = max(generated - accepted, 1)
            print(
                f"{kind:>8} {batch:>8} {middle['plain']:>9.0f} {middle['drafting']:>9.0f} "
                f"{statistics.median(ratios):>6.2f} {of_cpu:>6.2f} "
                f"{generated / all_rows:>11.2f} "
                f"{accepted / max(drafted, 1):>8.2f} {rows / all_rows:>16.2f}",
                flush=True,
            )


def edit(
    text: str, others: list[list[int]], tokenizer, rng: random.Random
) -> tuple[list[int], list[int]]:
    """A part of a text, and the same with a tenth of its lines replaced."""
    lines = text.splitlines(keepends=True)[:80]
    changed = list(lines)
    for index in rng.sample(range(len(lines)), len(lines) // 10):
        other = rng.choice(others)
        start = rng.randrange(max(len(other) - 12, 1))
        changed[index] = tokenizer.decode(other[start : start + 12]).replace("\n", " ") + "\n"
    encode = tokenizer.encode
    return (
        encode("".join(lines), add_special_tokens=False)[:600],
        encode("".join(changed), add_special_tokens=False),
    )


def requests(
    kind: str,
    batch: int,
    parts: list[list[int]],
    edited: list[tuple[list[int], list[int]]],
    max_tokens: int,
) -> tuple[list[list[int]], list[SamplingParams]]:
    base = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    indices = [number % (NUM_TEXTS // 2) for number in range(batch)]
    if kind == "editing":
        prompts = [edited[index][0] for index in indices]
        first = NUM_TEXTS // 2
        params = [base.clone(extra_args={"text": first + index}) for index in indices]
        return prompts, params
    prompts = [parts[index][:256] for index in indices]
    if kind == "written":
        return prompts, [base.clone(extra_args={"text": index}) for index in indices]
    temperature = 1.0 if kind == "sampled" else 0.0
    return prompts, [base.clone(temperature=temperature, seed=index) for index in indices]


if __name__ == "__main__":
    main()
