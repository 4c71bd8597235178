"""`jaxllm run-batch`: reads a file of requests and writes a file of answers."""

import argparse

from jaxllm.cli.arguments import (
    add_engine_arguments,
    add_option_arguments,
    engine_options_from,
    integer,
    options_from,
)
from jaxllm.files import read_given_text
from jaxllm.parsers.options import ParserOptions

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again

DETAILS = f"""\
A line of the input is a JSON object of one of two forms:
  {{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {{"messages": ...}}}}
  {{"prompt": "Once", "max_tokens": 32}}, or with "prompt_token_ids"; "custom_id" may be added
The first is OpenAI's batch form (also for /v1/completions), and so is its result:
  {{"id", "custom_id", "response": {{"status_code", "request_id", "body"}}, "error"}}
The second takes the parameters of SamplingParams, and gives
  {{"line", "custom_id", "prompt", "prompt_token_ids", "outputs": [{{"index", "text", "token_ids",
   "finish_reason", "stop_reason"}}], "num_cached_tokens"}}, or {{"line", "custom_id", "error"}}.

Every line that is not empty has one line of result: in the output if it was answered, else in the
error file; there the first form stands also for a line that is no request at all. Results are in
the order in which they were finished, unless --ordered is given.

A run that was stopped or killed is gone on with by the same command. SIGTERM and Ctrl-C let what
is under way finish within the grace period; a second one stops at once.

Paths may be remote (gs://, s3:// and whatever fsspec knows). Remote files cannot be appended to:
results gather in the journal's directory, and are uploaded when all lines are finished. That
directory must survive what kills the run.

exit status:
  0    every line has its result
  1    the engine hangs, or one of its hosts is gone; the same command goes on
  2    an error, which is printed; what was finished is kept
  {EXIT_STOPPED}   stopped by a signal; the same command goes on"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = DETAILS
    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="Requests, one on each line."
    )
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="Where the answers go."
    )
    parser.add_argument(
        "--error-file",
        metavar="FILE",
        help="Where lines without an answer go. Default: out.errors.jsonl for out.jsonl.",
    )
    parser.add_argument(
        "--journal-dir",
        metavar="DIR",
        help="Where it is kept what is finished. Default: out.jsonl.journal for out.jsonl; for a "
        "remote output in the current directory.",
    )
    parser.add_argument(
        "--ordered",
        action="store_true",
        help="Write the results in the order of the input; they appear when all are finished, and "
        "take twice their space until then.",
    )
    parser.add_argument(
        "--grace-period",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="How long after SIGTERM or Ctrl-C what is under way may finish. Default: 20.",
    )
    parser.add_argument(
        "--price-per-hour",
        type=float,
        metavar="X",
        help="Price of this machine; progress then tells the cost.",
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help='What "model" in a request may be. Default: --model.',
    )
    parser.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="Adapters that requests may name as their model; needs --enable-lora.",
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja template in place of the tokenizer's own."
    )
    parser.add_argument(
        "--max-line-bytes",
        type=integer,
        default=16 << 20,
        metavar="N",
        help="Longest line of the input. Default: 16MiB.",
    )
    add_option_arguments(parser, ParserOptions)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    engine_options = engine_options_from(args)
    template = read_given_text(args.chat_template) if args.chat_template else None

    from jaxllm.batch.job import BatchOptions, run_batch

    is_complete = run_batch(
        BatchOptions(
            input_file=args.input_file,
            output_file=args.output_file,
            error_file=args.error_file,
            journal_dir=args.journal_dir,
            ordered=args.ordered,
            grace_period_s=args.grace_period,
            price_per_hour=args.price_per_hour,
            served_model_name=tuple(args.served_model_name),
            lora_modules=tuple(args.lora_modules),
            chat_template=template,
            parsers=ParserOptions(**options_from(args, ParserOptions)),
            max_line_bytes=args.max_line_bytes,
        ),
        engine_options,
    )
    return 0 if is_complete else EXIT_STOPPED
