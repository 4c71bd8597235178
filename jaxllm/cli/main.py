"""`jaxllm <command>`: finds the command, runs it, and prints an error as one line.

A command is a module with `add_arguments(parser)` and `run(args)`, which may return an exit status.
The module is imported only when its command runs, so that `jaxllm --help` needs no jax.
"""

import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jaxllm
from jaxllm.cli.arguments import CommandParser
from jaxllm.errors import JaxLLMError, ValidationError
from jaxllm.importing import without_collections


class Command(NamedTuple):
    module: str
    summary: str


COMMANDS = {
    "generate": Command("jaxllm.cli.generate", "Generate text for prompts."),
    "chat": Command("jaxllm.cli.chat", "Talk to a model in the terminal, here or behind a server."),
    "complete": Command("jaxllm.cli.complete", "Let a model behind a server go on with prompts."),
    "serve": Command("jaxllm.cli.serve", "Serve a model over HTTP, as OpenAI's API does."),
    "route": Command(
        "jaxllm.cli.route", "Stand before servers that compute prompts and servers that answer."
    ),
    "run-batch": Command("jaxllm.cli.run_batch", "Answer a file of requests."),
    "bench serve": Command("jaxllm.cli.bench.serve", "Measure a server under load."),
    "bench throughput": Command(
        "jaxllm.cli.bench.throughput", "Measure how much an engine does in a second."
    ),
    "bench latency": Command("jaxllm.cli.bench.latency", "Measure how long a batch takes."),
    "plan": Command("jaxllm.cli.plan", "See what an engine would be on chips that are not here."),
    "simulate": Command(
        "jaxllm.cli.simulate", "See how a deployment that is not here would serve your traffic."
    ),
    "measure-steps": Command("jaxllm.cli.measure_steps", "Time an engine's steps, to simulate it."),
    "warmup": Command(
        "jaxllm.cli.warmup", "Compile an engine's programs now, so that its next start finds them."
    ),
    "train": Command("jaxllm.cli.train", "Train a small model on text."),
    "convert": Command(
        "jaxllm.cli.convert", "Write weights as engines hold them, which start from them sooner."
    ),
    "quantize": Command(
        "jaxllm.cli.quantize", "Write a checkpoint in 8 or 4 bits, and tell what that costs."
    ),
    "make-tiny-model": Command(
        "jaxllm.cli.make_tiny_model", "Write a small model with random weights, to try things out."
    ),
    "models": Command("jaxllm.cli.models", "Print a table of the models that can be run."),
    "collect-env": Command("jaxllm.cli.collect_env", "Print what a bug report needs to say."),
}

EXIT_ERROR = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT  # as a shell reports it
EXIT_BROKEN_PIPE = 128 + 13  # SIGPIPE, which not every platform has


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An answer may have characters that the terminal or the locale cannot show. Print "?" for
        # them instead of failing.
        sys.stdout.reconfigure(errors="replace")
    try:
        status = run(argv)
        # Flush here, because a closed pipe would otherwise raise at exit, after main.
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has closed the pipe. Redirect the buffered rest, or exit would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (JaxLLMError, OSError) as error:
        if "--debug" in argv:
            traceback.print_exc()
        print(f"jaxllm: error: {_one_line(error)}", file=sys.stderr)
        return EXIT_ERROR


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(overview(COMMANDS))
        return 0
    if argv[0] in ("-v", "--version"):
        print(f"jaxllm {jaxllm.__version__}")
        return 0
    # A command consists of one word or two.
    family = [name for name in COMMANDS if name.startswith(f"{argv[0]} ")]
    if family and argv[1:] in ([], ["-h"], ["--help"]):
        print(overview(family))
        return 0
    words = 2 if family else 1
    name, rest = " ".join(argv[:words]), argv[words:]
    if name not in COMMANDS:
        raise ValidationError(f"unknown command {name!r}; the commands are {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    with without_collections():
        module = importlib.import_module(command.module)
    parser = CommandParser(f"jaxllm {name}", command.summary)
    module.add_arguments(parser)
    return module.run(parser.parse(rest)) or 0


def overview(names: Iterable[str]) -> str:
    """Format the text of `jaxllm --help`, with these commands."""
    lines = ["usage: jaxllm <command> [arguments]", "", "LLM inference on JAX.", "", "commands:"]
    lines += [f"  {name:<16}  {COMMANDS[name].summary}" for name in names]
    lines += ["", "`jaxllm <command> --help` lists a command's arguments."]
    lines += ["`jaxllm --version` prints the version."]
    return "\n".join(lines)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; check the path"
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
