"""`jaxllm serve`: an OpenAI-compatible HTTP server."""

import argparse

from jaxllm.cli.arguments import (
    add_engine_arguments,
    add_option_arguments,
    engine_options_from,
    options_from,
)
from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError
from jaxllm.server.options import ServerOptions

DETAILS = """\
exit status:
  0    stopped by SIGTERM or Ctrl-C
  1    the engine, or one of several frontends, has ended; the log says why
  2    it could not start, for a reason that is printed"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = DETAILS
    add_option_arguments(parser, ServerOptions)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    options = ServerOptions(**options_from(args, ServerOptions))
    options.validate()
    config = EngineConfig.create(**engine_options_from(args))
    try:
        from jaxllm.server.run import run_server
    except ModuleNotFoundError as error:
        raise ValidationError(
            f"the server needs {error.name}; install it with pip install 'jaxllm[server]'"
        ) from error
    return run_server(options, config)
