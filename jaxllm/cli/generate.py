"""`jaxllm generate`: prompts in, answers out, all at once through `LLM.generate`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any, cast

import msgspec

from jaxllm.cli.arguments import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_options_from,
    sampling_params_from,
)
from jaxllm.errors import ValidationError
from jaxllm.messages import PromptType, RequestOutput
from jaxllm.sampling_params import SamplingParams

PROMPT_KEYS = ("prompt", "prompt_token_ids")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="A prompt; may be repeated."
    )
    parser.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="More prompts, one per line; - is standard input. In a .jsonl file a line is a string "
        'or an object: {"prompt": ...} or {"prompt_token_ids": ...}.',
    )
    parser.add_argument(
        "--json", action="store_true", help="Print one JSON object per answer, for programs."
    )
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> None:
    options = engine_options_from(args)
    prompts = list(args.prompt)
    if args.prompts_file is not None:
        prompts += read_prompts(args.prompts_file)
    if not prompts:
        raise ValidationError("no prompts; give --prompt TEXT or --prompts-file FILE")
    # Refuse a bad flag before the model is loaded; its own defaults are known only afterwards.
    sampling_params_from(args, SamplingParams(max_tokens=None))

    from jaxllm.llm import LLM

    llm = LLM(**options)
    params = sampling_params_from(args, llm.get_default_sampling_params())
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    if args.json:
        print("\n".join(as_json(output) for output in outputs))
    else:
        print("\n\n".join(as_text(output, dim=sys.stdout.isatty()) for output in outputs))


def read_prompts(path: str) -> list[PromptType]:
    """Read a file of prompts; empty lines are skipped."""
    try:
        if path == "-":
            lines = sys.stdin.read().splitlines()
        else:
            with open(path, encoding="utf-8") as file:
                lines = file.read().splitlines()
    except UnicodeDecodeError as error:
        raise ValidationError(f"{path}: not UTF-8 ({error.reason}); convert the file") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not path.endswith(".jsonl"):
        return [line for _, line in numbered]
    return [_prompt_from_json(line, f"{path}:{number}") for number, line in numbered]


def as_json(output: RequestOutput) -> str:
    """One line per answer: what was asked, what came, and when."""
    return "\n".join(msgspec.json.encode(record).decode() for record in _records(output))


def as_text(output: RequestOutput, *, dim: bool) -> str:
    """Each answer after its prompt, which stands back on a terminal."""
    prompt = output.prompt
    if prompt is None:
        prompt = f"[{len(output.prompt_token_ids)} prompt tokens] "
    if dim:
        prompt = f"\033[2m{prompt}\033[0m"
    return "\n\n".join(prompt + answer.text for answer in output.outputs)


def _records(output: RequestOutput) -> Iterator[dict[str, Any]]:
    for answer in output.outputs:
        record = {
            "request_id": output.request_id,
            "prompt": output.prompt,
            "prompt_token_ids": output.prompt_token_ids,
            **dataclasses.asdict(answer),
            "num_cached_tokens": output.num_cached_tokens,
            "metrics": output.metrics,
        }
        if answer.logprobs is None:
            del record["logprobs"], record["cumulative_logprob"]
        if output.prompt_logprobs is not None:
            record["prompt_logprobs"] = output.prompt_logprobs
        yield record


def _prompt_from_json(line: str, where: str) -> PromptType:
    try:
        prompt = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValidationError(f"{where}: not JSON ({error})") from None
    is_prompt = isinstance(prompt, str) or (
        isinstance(prompt, dict) and not prompt.keys().isdisjoint(PROMPT_KEYS)
    )
    if not is_prompt:
        raise ValidationError(
            f"{where}: a line must be a string or an object with {' or '.join(PROMPT_KEYS)}"
        )
    return cast(PromptType, prompt)
