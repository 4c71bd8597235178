"""`jaxllm plan`: predicts an engine on chips that are not here, by compiling its programs.

The compiled programs can be kept as a bundle for an engine on such chips.
"""

import argparse
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.cache_groups import describe_groups, describe_room, shown_lengths
from jaxllm.cli.arguments import add_engine_arguments, engine_options_from
from jaxllm.errors import JaxLLMError, ValidationError
from jaxllm.logging import init_logger
from jaxllm.plural import counted

if TYPE_CHECKING:
    from jaxllm.programs.report import PlanReport, ProgramReport

logger = init_logger(__name__)

WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt")  # a user may give these instead of a config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("Where")
    where.add_argument("--tpu", metavar="SLICE", help="A TPU slice, for example v6e-8.")
    where.add_argument("--gpu", metavar="NAME", help="A GPU, h200, or several, h200-8.")
    where.add_argument("--cpu", action="store_true", help="The CPU of this machine.")
    where.add_argument(
        "--compare", metavar="A,B,...", help="Several of them, side by side: v5e-8,v6e-4,h200."
    )
    parser.add_argument(
        "--context",
        type=int,
        default=1024,
        help="Tokens of every row in bounds. Default: 1024.",
    )
    parser.add_argument(
        "--price-per-chip-hour",
        type=float,
        metavar="X",
        help="Turns the bound on tokens per second into one on the cost of a million tokens.",
    )
    parser.add_argument(
        "--all-programs",
        action="store_true",
        help="Compile every program, and not only the largest of each kind.",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="Compile every program, and keep them there for an engine with the same flags and "
        "--program-bundle DIR, on such chips.",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON, for programs.")
    add_engine_arguments(parser, without=("program_bundle",))


def run(args: argparse.Namespace) -> None:
    names = args.compare.split(",") if args.compare else [args.tpu or args.gpu or "cpu"]
    if sum(map(bool, (args.tpu, args.gpu, args.cpu, args.compare))) != 1:
        raise ValidationError(
            "say where: one of --tpu SLICE, --gpu NAME, --cpu and --compare A,B,..."
        )
    if args.out and args.compare:
        raise ValidationError("--out keeps the programs of one plan; leave out --compare")
    if args.context < 1:
        raise ValidationError(f"--context {args.context} must be at least 1")
    options = engine_options_from(args)
    given = options.get("model")
    with contextlib.ExitStack() as stack:
        if given is not None and Path(given).is_file() and not given.endswith(WEIGHTS):
            options["model"] = stack.enter_context(directory_of_config(Path(given)))
        reports = make_reports(names, options, args, given)
    if args.json:
        print(json.dumps({name: as_json(report) for name, report in reports.items()}, indent=1))
    elif len(names) == 1:
        (report,) = reports.values()
        assert not isinstance(report, JaxLLMError)
        print(as_text(names[0], report, args.price_per_chip_hour))
    else:
        print(as_table(reports, args.price_per_chip_hour))


@contextlib.contextmanager
def directory_of_config(file: Path) -> Iterator[str]:
    """Yield a model directory with only this config, which may have any file name."""
    from jaxllm.weights.checkpoint import read_json

    config = read_json(file)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield directory


def make_reports(
    names: list[str], options: dict[str, Any], args: argparse.Namespace, model: str | None
) -> "dict[str, PlanReport | JaxLLMError]":
    """Plan for each slice or GPU, and report the model under the given name. Of several, a report
    may be the error."""
    import jax

    # No program runs here, and an installed TPU runtime must not look for a TPU.
    jax.config.update("jax_platforms", "cpu")
    reports: dict[str, PlanReport | JaxLLMError] = {}
    for name in names:
        try:
            report = make_report(name, options, args)
            reports[name] = dataclasses.replace(report, model=model or report.model)
        except JaxLLMError as error:
            if len(names) == 1:
                raise
            reports[name] = error
    return reports


def make_report(name: str, options: dict[str, Any], args: argparse.Namespace) -> "PlanReport":
    """Plan for one slice or GPU. All of its devices are one replica unless options differ."""
    from jaxllm_kernels.topology import topology_devices

    from jaxllm.config import EngineConfig
    from jaxllm.programs.bundle import BundleWriter
    from jaxllm.programs.compile import without_compilation_cache
    from jaxllm.programs.report import report_plan
    from jaxllm.programs.sizing import plan_engine

    try:
        devices = topology_devices(name)
    except ValueError as error:
        raise ValidationError(str(error)) from error
    except Exception as error:
        raise JaxLLMError(
            f"there is no compiler for {name} here ({error}); for TPUs install jaxllm[tpu], for "
            "GPUs jaxllm[cuda]"
        ) from error
    num_shards = max(1, len(devices) // options.get("pipeline_parallel_size", 1))
    config = EngineConfig.create(**{"tensor_parallel_size": num_shards, **options})

    logger.info("planning for %s", name)
    plan = plan_engine(config, devices)
    writer = BundleWriter(Path(args.out), plan) if args.out else None
    with without_compilation_cache() if writer else contextlib.nullcontext():
        report = report_plan(
            plan,
            context=args.context,
            all_programs=args.all_programs or writer is not None,
            on_compiled=writer.add if writer else lambda key, compiled: None,
        )
    if writer:
        logger.info("bundle %s", writer.finish())
    return report


def as_json(report: "PlanReport | JaxLLMError") -> dict[str, Any]:
    if isinstance(report, JaxLLMError):
        return {"error": str(report)}
    return {
        **dataclasses.asdict(report),
        "num_tokens": report.num_tokens,
        "free_bytes": report.free_bytes,
    }


def as_text(name: str, report: "PlanReport", price: float | None) -> str:
    """Format one plan as a page."""
    width = max(20, *(len(program.name) + 2 for program in report.programs))
    lines = [
        f"{report.model} on {name}: {report.num_devices} x {report.chip}, {report.dtype}, "
        f"attention {report.attention_backend!r}"
        + (f", experts {report.experts!r}" if report.experts is not None else ""),
        *(f"layers {layer}" for layer in report.layers),
        *(f"products with {how}" for how in report.coded_products),
        "",
        *_memory_lines(report),
        "",
        f"KV cache{f' of {report.kv_cache}' if report.kv_cache else ''}: "
        f"{describe_groups(report.cache_groups, report.block_size)}: "
        + describe_room(report.room_for, [*shown_lengths(report.max_model_len), report.context]),
        *_offload_lines(report),
        "",
        f"{'program':<{width}}{'compiled':>9}{'temp':>10}{'code':>9}{'least time':>12}  limited by",
    ]
    for program in report.programs:
        bound = program.bound
        lines.append(
            f"{program.name:<{width}}{program.compile_seconds:>7.1f} s"
            f"{program.temp_bytes / 2**20:>6.0f} MiB{program.code_bytes / 2**20:>5.0f} MiB"
            + (f"{1e3 * bound.seconds:>9.2f} ms  {bound.limited_by}" if bound else "")
        )
    lines += ["", *(_collectives(program) for program in report.programs)]
    copies = sorted({copy for program in report.programs for copy in program.whole_array_copies})
    lines.append(f"copies of whole weights or caches: {', '.join(copies) or 'none'}")
    if report.max_tokens_per_second is not None:
        lines += ["", *_bound_lines(report, price)]
    return "\n".join(lines)


def _offload_lines(report: "PlanReport") -> list[str]:
    its = report.offload
    if its is None:
        return []
    groups = (
        dataclasses.replace(group, num_blocks=num_blocks)
        for group, num_blocks in zip(report.cache_groups, its.num_blocks, strict=True)
    )
    lines = [
        f"on the host {its.num_bytes / 2**30:.2f} GiB: "
        + describe_groups(groups, report.block_size)
        + (f", {counted(its.num_snapshots, 'snapshot')} of states" if its.num_snapshots else "")
    ]
    if its.seconds_to_load and its.seconds_to_compute:
        ratio = its.seconds_to_compute / its.seconds_to_load
        lines.append(
            f"a block comes back in {1e3 * its.seconds_to_load:.2f} ms at 45 GB/s; to compute it "
            f"takes at least {1e3 * its.seconds_to_compute:.2f} ms: "
            + (f"it pays {ratio:.1f} times" if ratio > 1 else "it does not pay")
        )
    return lines


def _memory_lines(report: "PlanReport") -> list[str]:
    """Format the memory use, with a column for each stage."""
    stages = report.stages
    rows = [
        ("weights", [stage.weights_bytes for stage in stages]),
        *(("  of the draft", [s.draft_weights_bytes]) for s in stages if s.draft_weights_bytes),
        ("KV cache", [stage.kv_cache_bytes for stage in stages]),
        *(("  of the draft", [s.draft_cache_bytes]) for s in stages if s.draft_weights_bytes),
        (
            "sampler, tables, steps",
            [
                s.state_bytes - s.recurrent_bytes - s.snapshots_bytes - s.adapters_bytes
                for s in stages
            ],
        ),
        *(
            [("recurrent layers", [s.recurrent_bytes for s in stages])]
            if any(s.recurrent_bytes for s in stages)
            else []
        ),
        *(
            [("  snapshots of them", [s.snapshots_bytes for s in stages])]
            if any(s.snapshots_bytes for s in stages)
            else []
        ),
        *(
            [("adapters", [s.adapters_bytes for s in stages])]
            if any(s.adapters_bytes for s in stages)
            else []
        ),
        ("programs", [stage.program_bytes for stage in stages]),
    ]
    if report.hbm_bytes:
        rows += [
            ("left", [report.hbm_bytes - stage.used_bytes for stage in stages]),
            ("in all", [report.hbm_bytes for _ in stages]),
        ]
    lines = ["memory of each device        GiB"]
    if len(stages) > 1:
        layers = "".join(f"{stage.num_layers:>10}" for stage in stages)
        names = "".join(f"{f'stage {index}':>10}" for index in range(len(stages)))
        lines = [f"{'GiB of each device':<24}{names}", f"  {'layers':<22}{layers}"]
    return lines + [
        f"  {what:<22}" + "".join(f"{size / 2**30:10.2f}" for size in sizes) for what, sizes in rows
    ]


def _collectives(program: "ProgramReport") -> str:
    found = [
        f"{count} {opcode} ({size / 2**20:.2f} MiB)"
        for opcode, (count, size) in sorted(program.collectives.items())
    ]
    return f"{program.name}: {', '.join(found) or 'no collectives'}"


def _bound_lines(report: "PlanReport", price: float | None) -> list[str]:
    assert report.pace is not None
    lines = [
        f"bound, not a prediction: at most {report.max_tokens_per_second:,.0f} output tokens per "
        f"second with {report.context} tokens of context, limited by {report.pace.limited_by}",
        _advice(report),
    ]
    if len(report.stages) > 1:
        lines.insert(
            1,
            f"(each of the {len(report.stages)} stages has a step of its share of the rows; the "
            "slowest sets the pace)",
        )
    if price is not None:
        lines.append(f"at least {_cost(report, price):.3f} per million output tokens")
    return lines


def _advice(report: "PlanReport") -> str:
    rows = report.largest_decode.num_decodes
    if report.num_fitting < rows:
        return (
            f"the KV cache holds {report.num_fitting} of {rows} rows of that context: take more "
            "chips, or lower --max-num-seqs, or raise --gpu-memory-utilization"
        )
    return f"the KV cache holds all {rows} rows of that context: --max-num-seqs is the limit"


def _cost(report: "PlanReport", price: float) -> float:
    assert report.max_tokens_per_second is not None, report.chip
    return price * report.num_chips / 3600 / report.max_tokens_per_second * 1e6


def as_table(reports: "dict[str, PlanReport | JaxLLMError]", price: float | None) -> str:
    """Format a table with a line for each slice or GPU."""
    header = (
        f"{'':<10}{'devices':>8}{'weights':>9}{'KV cache':>10}{'tokens':>10}{'least decode':>14}"
        f"{'most tokens/s':>15}" + (f"{'least cost/M':>14}" if price is not None else "")
    )
    lines = [header]
    for name, report in reports.items():
        if isinstance(report, JaxLLMError):
            lines.append(f"{name:<10}  {report}")
            continue
        line = (
            f"{name:<10}{report.num_devices:>8}{report.weights_bytes / 2**30:>9.2f}"
            f"{report.kv_cache_bytes / 2**30:>10.2f}{report.num_tokens:>10}"
        )
        bound = report.largest_decode.bound
        if bound is not None:
            line += f"{1e3 * bound.seconds:>11.2f} ms{report.max_tokens_per_second:>15,.0f}"
            line += f"{_cost(report, price):>14.3f}" if price is not None else ""
        lines.append(line)
    lines.append("GiB of one device; times and rates are bounds and not predictions")
    return "\n".join(lines)
