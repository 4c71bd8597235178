"""`jaxllm generate`: answers a file of prompts with one call of `LLM.generate`."""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from jaxllm.cli.arguments import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_options_from,
    sampling_params_from,
)
from jaxllm.errors import JaxLLMError, ValidationError, not_utf8
from jaxllm.files import parse_json, read_given_text
from jaxllm.lora.request import LoRARequest
from jaxllm.outputs import RequestOutput
from jaxllm.plural import counted
from jaxllm.prompts import PromptType
from jaxllm.sampling_params import SamplingParams, StructuredOutputsParams

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
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="An image for every prompt, at the model's mark for one (such as [IMG]); may be "
        "repeated.",
    )
    parser.add_argument(
        "--video",
        action="append",
        default=[],
        metavar="PATH",
        help="A video for every prompt, a file or a directory of frames, at the model's mark for "
        "one (such as <|video_pad|>); may be repeated.",
    )
    parser.add_argument(
        "--json", action="store_true", help="Print one JSON object per answer, for programs."
    )
    parser.add_argument(
        "--lora",
        metavar="DIR",
        help="An adapter of the model, with which it answers all prompts; turns --enable-lora on.",
    )
    form = parser.add_argument_group("Form of the answers", "At most one of these.")
    form.add_argument("--json-schema", metavar="FILE", help="JSON that fits the schema in a file.")
    form.add_argument("--regex", metavar="TEXT", help="Text that matches the whole of a regex.")
    form.add_argument(
        "--choice", action="append", default=[], metavar="TEXT", help="This, or another --choice."
    )
    form.add_argument(
        "--grammar", metavar="FILE", help="Text of the grammar in a file, in Lark or in EBNF."
    )
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> None:
    options = engine_options_from(args)
    lora = None
    if args.lora is not None:
        lora = LoRARequest(Path(args.lora).name, 1, args.lora)
        options["enable_lora"] = True
    prompts = [Prompt(f"--prompt {text!r:.40}", text) for text in args.prompt]
    if args.prompts_file is not None:
        prompts += read_prompts(args.prompts_file)
    if not prompts:
        raise ValidationError("no prompts; give --prompt TEXT or --prompts-file FILE")
    # Refuse an invalid flag before the model is loaded. The model's defaults are known later.
    form = form_from(args)
    sampling_params_from(args, SamplingParams(max_tokens=None))

    from jaxllm.llm import LLM

    if not options.get("enforce_eager") and options.get("nnodes", 1) == 1:
        options.setdefault("compile_behind", True)  # few prompts do not need every program
    llm = LLM(**options)
    params = sampling_params_from(args, llm.get_default_sampling_params())
    params = params.clone(structured_outputs=form)
    plain = [with_media(one.prompt, args.image, args.video) for one in prompts]
    if llm.llm_engine.config.profiler.profile_dir is not None:
        llm.start_profile()
    try:
        outputs = llm.generate(plain, params, lora_request=lora, use_tqdm=sys.stderr.isatty())
    except ValidationError as error:
        if error.prompt_index is None:
            raise
        where = prompts[error.prompt_index].where
        raise ValidationError(f"{where}: {error.__cause__}") from error
    try:
        if args.json:
            print("\n".join(as_json(output) for output in outputs), flush=True)
        else:
            shown = (as_text(output, dim=sys.stdout.isatty()) for output in outputs)
            print("\n\n".join(shown), flush=True)
    finally:
        llm.shutdown()  # writes the profile
    failed = [a for output in outputs for a in output.outputs if a.finish_reason == "error"]
    if failed:
        raise JaxLLMError(
            f"{counted(len(failed), 'answer')} ended in an error: {failed[0].stop_reason}"
        )


def with_media(prompt: PromptType, images: list[str], videos: list[str]) -> PromptType:
    """The prompt with these files of images and videos, before those that it has."""
    given = {"image": images, "video": videos}
    if not any(given.values()):
        return prompt
    keys: Any = {"prompt": prompt} if isinstance(prompt, str) else prompt
    data = dict(keys.get("multi_modal_data") or {})
    for kind, paths in given.items():
        its = data.get(kind) or []
        if paths:
            data[kind] = [*paths, *(its if isinstance(its, list) else [its])]
    return cast(PromptType, {**keys, "multi_modal_data": data})


def form_from(args: argparse.Namespace) -> StructuredOutputsParams | None:
    """The form that the flags ask for."""
    given: dict[str, Any] = {
        "json": args.json_schema and read_given_text(args.json_schema),
        "regex": args.regex,
        "choice": args.choice or None,
        "grammar": args.grammar and read_given_text(args.grammar),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    try:
        return StructuredOutputsParams(**given)
    except ValidationError as error:
        message = str(error)
        for name in given:
            flag = "--json-schema" if name == "json" else f"--{name}"
            message = message.replace(f"structured_outputs.{name}", flag)
        raise ValidationError(message, parameter=error.parameter) from error


class Prompt(NamedTuple):
    """A prompt and its place in the input."""

    where: str
    prompt: PromptType


def read_prompts(path: str) -> list[Prompt]:
    """Read a file of prompts, one per line; empty lines are skipped."""
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from None
    prompts = []
    # splitlines() would also split at form feeds and Unicode separators, which belong to a prompt.
    for number, line in enumerate(text.split("\n"), 1):
        line, where = line.removesuffix("\r"), f"{path}:{number}"
        if line.strip():
            is_json = path.endswith(".jsonl")
            prompts.append(Prompt(where, _prompt_from_json(line, where) if is_json else line))
    return prompts


def as_json(output: RequestOutput) -> str:
    """Format one line per answer: the prompt, the answer and its times."""
    return "\n".join(msgspec.json.encode(record).decode() for record in _records(output))


def as_text(output: RequestOutput, *, dim: bool) -> str:
    """Format each answer after its prompt; `dim` shows the prompt in a fainter colour."""
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
        del record["lora_request"]
        if answer.logprobs is None:
            del record["logprobs"], record["cumulative_logprob"]
        if output.prompt_logprobs is not None:
            record["prompt_logprobs"] = output.prompt_logprobs
        yield record


def _prompt_from_json(line: str, where: str) -> PromptType:
    try:
        prompt = parse_json(line)
    except ValueError as error:
        raise ValidationError(f"{where}: not JSON ({error})") from None
    is_prompt = isinstance(prompt, str) or (
        isinstance(prompt, dict) and not prompt.keys().isdisjoint(PROMPT_KEYS)
    )
    if not is_prompt:
        raise ValidationError(
            f"{where}: a line must be a string or an object with {' or '.join(PROMPT_KEYS)}"
        )
    return cast(PromptType, prompt)
