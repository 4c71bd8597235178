"""`jaxllm route`: one address in front of engines that hand prompts over."""

import argparse

from jaxllm.cli.arguments import add_option_arguments, options_from
from jaxllm.errors import ValidationError
from jaxllm.server.route_options import RouteOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option_arguments(parser, RouteOptions)


def run(args: argparse.Namespace) -> None:
    options = RouteOptions(**options_from(args, RouteOptions))
    options.validate()
    try:
        from jaxllm.server.route import run_router
    except ModuleNotFoundError as error:
        raise ValidationError(
            f"the router needs {error.name}; install it with pip install 'jaxllm[server]'"
        ) from error
    run_router(options)
