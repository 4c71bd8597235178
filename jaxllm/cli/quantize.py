"""`jaxllm quantize`: writes a checkpoint whose linear layers have codes of 8 or 4 bits."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.cli.arguments import integer
from jaxllm.errors import ValidationError
from jaxllm.files import read_given_text

if TYPE_CHECKING:
    from jaxllm.quantization.write import LayerError

_SHOWN = 5  # layers with the largest errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="Directory or hub name of the checkpoint in 16 or 32 bits."
    )
    parser.add_argument("out", metavar="OUT", help="Directory to write; made if needed.")
    parser.add_argument(
        "--format",
        required=True,
        choices=("int8", "fp8", "int4"),
        help="Of the codes: 8 bits, a scale for each output; or 4 bits, a scale for each group.",
    )
    parser.add_argument(
        "--group-size",
        type=integer,
        default=128,
        metavar="N",
        help="Inputs that share a scale, for int4. Default: 128.",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="A text of which to tell the loss before and after, in bits per byte.",
    )
    parser.add_argument("--report", metavar="FILE", help="Where to write the figures as JSON.")
    parser.add_argument("--plot", metavar="FILE", help="Where to draw the errors of layers as SVG.")


def run(args: argparse.Namespace) -> None:
    if args.group_size < 8 or args.group_size % 8:
        raise ValidationError(f"--group-size={args.group_size} must be a multiple of 8")
    text = None if args.text is None else read_given_text(args.text)
    from jaxllm.quantization.write import write_quantized
    from jaxllm.weights.checkpoint import resolve_model_dir

    model_dir, out = resolve_model_dir(args.model), Path(args.out)
    written = write_quantized(model_dir, out, args.format, group_size=args.group_size)
    worst = sorted(written.errors, key=lambda its: -its.relative)
    mean = sum(its.relative for its in worst) / len(worst)
    print(
        f"{out}: {len(worst)} weights in {args.format}, {written.num_kept} tensors as they were; "
        f"{written.bytes_after / written.bytes_before:.2f} of the bytes\n"
        f"relative error of weights (root mean square): {mean:.2%} in the mean; the largest:"
    )
    for error in worst[:_SHOWN]:
        print(f"  {error.relative:.2%}  {error.name}")
    models = {"before": model_dir, "after": out}
    losses = None if text is None else {name: _loss(its, text) for name, its in models.items()}
    if losses is not None:
        before, after = losses["before"], losses["after"]
        print(f"bits per byte of {args.text}: {before:.4f} before, {after:.4f} after")
    if args.report is not None:
        report = {
            "format": args.format,
            "errors": {its.name: its.relative for its in written.errors},
            "bytes_before": written.bytes_before,
            "bytes_after": written.bytes_after,
            "bits_per_byte": losses,
        }
        Path(args.report).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if args.plot is not None:
        Path(args.plot).write_text(_plot(written.errors, args.format), encoding="utf-8")


def _loss(model: Path, text: str) -> float:
    """The loss of a model, in an engine that is gone afterwards."""
    from jaxllm.bench.loss import measure_loss
    from jaxllm.llm import LLM

    llm = LLM(str(model), enforce_eager=True, max_num_seqs=4)
    try:
        return measure_loss(llm, text).bits_per_byte
    finally:
        llm.shutdown()


def _plot(errors: "tuple[LayerError, ...]", kind: str) -> str:
    """A curve of the errors of all layers for each kind of matrix."""
    from jaxllm.bench.svg import Chart, Line, draw

    lines: dict[str, list[float]] = {}
    for error in errors:
        lines.setdefault(error.name.rpartition(".")[2], []).append(100 * error.relative)
    charts = [
        Line(name, list(map(float, range(len(its)))), its) for name, its in sorted(lines.items())
    ]
    return draw([Chart(f"Error of weights in {kind}", "place in the model", "percent", charts)], 1)
