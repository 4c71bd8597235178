"""`jaxllm bench serve`: sends a load to a server of OpenAI's protocol."""

import argparse
from dataclasses import replace
from pathlib import Path

from jaxllm.bench.options import DatasetOptions, LoadOptions, ReportOptions
from jaxllm.cli.api_key import with_api_key
from jaxllm.cli.arguments import add_option_arguments, options_from
from jaxllm.errors import JaxLLMError, ValidationError

DETAILS = """\
A request has failed if its status is not 200, its connection breaks, its time is over, or its
answer is empty, an error or incomplete. Failed requests are counted, with their reasons, and in no
other figure.

exit status:
  0    requests were answered; look at `failed` for those that were not
  2    none was, or there was nothing to measure"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = DETAILS
    for options in (LoadOptions, DatasetOptions, ReportOptions):
        add_option_arguments(parser, options)
    parser.add_argument("--api-key-file", metavar="FILE", help="File with the server's key.")


def run(args: argparse.Namespace) -> None:
    data = DatasetOptions(**options_from(args, DatasetOptions))
    load = LoadOptions(**options_from(args, LoadOptions))
    report = ReportOptions(**options_from(args, ReportOptions))
    try:
        from jaxllm.bench.report import as_text, default_name, write_json
        from jaxllm.bench.serve import Measured, bench_serve, detailed
    except ModuleNotFoundError as error:
        raise ValidationError(
            f"the client needs {error.name}; install it with pip install 'jaxllm[server]'"
        ) from error

    def measure(key: str | None) -> Measured:
        return bench_serve(data, replace(load, api_key=key), report)

    measured, result = with_api_key(load.api_key, args.api_key_file, measure)
    print(as_text(result, report.shown_metrics(), report.percentiles()))
    if report.save_result or report.save_detailed:
        name = report.result_filename or default_name(result)
        more = detailed(measured) if report.save_detailed else {}
        write_json(Path(report.result_dir or ".") / name, result | more)
    if report.plot is not None:
        from jaxllm.bench.plot import plot

        plot(report.plot, measured.outcomes)
    if not result["completed"]:
        raise JaxLLMError(
            f"no request was answered, of {result['failed']}: {measured.outcomes[0].error}"
        )
