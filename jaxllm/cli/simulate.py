"""`jaxllm simulate`: predicts how a deployment would serve a trace, and how many chips it needs. It
runs the real scheduler, cache and router with a model of the time of a step."""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.cli.arguments import json_object
from jaxllm.errors import ValidationError, refused
from jaxllm.plural import counted

if TYPE_CHECKING:
    from jaxllm.simulation.deployment import Deployment
    from jaxllm.simulation.report import Summary
    from jaxllm.simulation.trace import Trace

_GOALS = ("ttft", "tpot", "e2el")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("What is served")
    what.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="JSON lines of timestamp (ms), input_length, output_length and perhaps hash_ids, or "
        "a CSV of TIMESTAMP, ContextTokens, GeneratedTokens. Without it requests are drawn:",
    )
    what.add_argument("--num-requests", type=int, metavar="N", help="Most requests. Default: 1000.")
    what.add_argument(
        "--request-rate",
        type=float,
        metavar="X",
        help="Requests per second: of drawn ones (default: all at once), or to which a trace is "
        "stretched.",
    )
    what.add_argument(
        "--burstiness", type=float, default=1.0, help="1 is a Poisson process, less is burstier."
    )
    what.add_argument("--input-len", type=int, default=1024, help="Mean tokens of a prompt.")
    what.add_argument("--output-len", type=int, default=128, help="Mean tokens of an answer.")
    what.add_argument(
        "--spread", type=float, default=0.5, help="Deviation of the logarithm of both lengths."
    )
    what.add_argument("--num-prefixes", type=int, default=0, help="Heads that prompts share.")
    what.add_argument(
        "--prefix-len", type=int, default=1024, help="Their length, a multiple of 512."
    )
    what.add_argument("--seed", type=int, default=0, help="Of what is drawn.")

    where = parser.add_argument_group("By what")
    where.add_argument(
        "--plan", type=Path, metavar="PLAN.json", help="The output of `jaxllm plan --json`."
    )
    where.add_argument("--on", metavar="NAME", help="Which of the plans in it, as v6e-8.")
    where.add_argument(
        "--step-times", type=Path, metavar="FILE", help="The output of `jaxllm measure-steps`."
    )
    where.add_argument(
        "--efficiency",
        type=float,
        help="With a plan: the share of its roofline that steps reach, which has to be known from "
        "elsewhere.",
    )
    where.add_argument(
        "--launch-us", type=float, default=0.0, help="Added to every step of a plan."
    )
    where.add_argument(
        "--host-us", type=float, help="Of the host per step. Default: 700, or what was measured."
    )
    where.add_argument("--replicas", type=int, default=1, help="Replicas of the model.")
    where.add_argument(
        "--find-replicas",
        type=float,
        metavar="SHARE",
        help="Find the fewest replicas that serve this share of the requests within --goodput.",
    )
    where.add_argument(
        "--routing-policy", choices=("prefix", "least_work", "random"), default="prefix",
        help="Who serves a request: as jaxllm and its fleets route, or to compare with.",
    )  # fmt: skip
    where.add_argument(
        "--max-ongoing-requests", type=int, metavar="N",
        help="Most requests of one replica; others wait for whichever has room first, as in a "
        "fleet under Ray Serve. Default: no such limit.",
    )  # fmt: skip
    where.add_argument(
        "--autoscaling-config",
        type=json_object,
        metavar="JSON",
        help="Ray Serve's, with its names, in place of --replicas: min_replicas, max_replicas, "
        "target_ongoing_requests, ...",
    )
    where.add_argument(
        "--startup-s",
        type=float,
        metavar="X",
        help="Seconds from the decision for a replica until it takes requests, which have to be "
        "known from elsewhere.",
    )
    where.add_argument("--scheduling-policy", default="fcfs", help="Order of requests.")
    where.add_argument(
        "--async-scheduling", action=argparse.BooleanOptionalAction, default=True,
        help="Plan a step while the one before runs.",
    )  # fmt: skip
    where.add_argument(
        "--long-prefill-token-threshold", type=int, default=0,
        help="Most prompt tokens of one request in one step; 0 means no such limit.",
    )  # fmt: skip
    where.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True,
        help="Share KV blocks between requests with equal heads.",
    )  # fmt: skip

    where.add_argument(
        "--kv-offloading-size",
        type=float,
        metavar="GiB",
        help="Of the host's memory for evicted blocks, with a plan that was made with this option. "
        "Default: the plan's; 0: none.",
    )

    told = parser.add_argument_group("What is told")
    told.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="Limits of a request that is well served: ttft:500 tpot:50 e2el:10000.",
    )
    told.add_argument("--price-per-chip-hour", type=float, metavar="X", help="Tells the cost.")
    told.add_argument("--json", action="store_true", help="Print JSON, for programs.")


def run(args: argparse.Namespace) -> None:
    goals = _goals(args.goodput)
    for name in ("num_requests", "input_len", "output_len", "replicas", "max_ongoing_requests"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise refused(name, value, "it must be at least 1")
    for name in (
        "seed", "num_prefixes", "spread", "launch_us", "host_us", "price_per_chip_hour",
        "startup_s", "kv_offloading_size",
    ):  # fmt: skip
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            raise refused(name, value, "it must be at least 0")
    for name in ("request_rate", "burstiness"):
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise refused(name, value, "it must be above 0")
    if args.find_replicas is not None and not (goals and 0 < args.find_replicas <= 1):
        raise ValidationError("--find-replicas is a share above 0, to 1, and needs --goodput")
    if args.autoscaling_config is None:
        if args.startup_s is not None:
            raise ValidationError("--startup-s needs --autoscaling-config; give it, too")
    elif args.startup_s is None:
        raise ValidationError(
            "--autoscaling-config needs to know how long a replica takes to start: --startup-s 90"
        )
    elif args.find_replicas is not None or args.replicas != 1:
        raise ValidationError(
            "--autoscaling-config finds the number of replicas itself; leave out --replicas and "
            "--find-replicas"
        )
    if args.kv_offloading_size and not args.enable_prefix_caching:
        raise refused(
            "kv_offloading_size",
            args.kv_offloading_size,
            "the host has blocks by their prefixes; leave enable_prefix_caching on",
        )
    deployment = _deployment(args)
    trace = _trace(args)
    if args.find_replicas is None:
        summary = _simulate(args, trace, deployment, args.replicas, goals)
    else:
        summary = _fewest(args, trace, deployment, goals)
    if args.json:
        print(json.dumps({"name": deployment.name, **dataclasses.asdict(summary)}, indent=1))
    else:
        from jaxllm.simulation.report import as_text

        print(as_text(deployment.name, summary))


def _deployment(args: argparse.Namespace) -> "Deployment":
    from jaxllm.simulation.deployment import read_measurement, read_plan

    if (args.plan is None) == (args.step_times is None):
        raise ValidationError("say by what: one of --plan PLAN.json and --step-times FILE")
    if args.step_times is not None:
        if args.kv_offloading_size:
            raise refused(
                "kv_offloading_size",
                args.kv_offloading_size,
                "blocks do not move where steps are measured; give a --plan",
            )
        deployment = read_measurement(args.step_times)
        if args.host_us is not None:
            deployment = dataclasses.replace(deployment, host_s_per_step=args.host_us / 1e6)
        return deployment
    if args.efficiency is None or not 0 < args.efficiency <= 1:
        raise ValidationError(
            "--plan gives a bound, which nothing reaches: say how much of it, --efficiency 0.6"
        )
    return read_plan(
        args.plan,
        name=args.on,
        efficiency=args.efficiency,
        launch_s=args.launch_us / 1e6,
        host_s_per_step=(700 if args.host_us is None else args.host_us) / 1e6,
        # Without prefixes nothing is found on the host either.
        kv_offloading_size=args.kv_offloading_size if args.enable_prefix_caching else 0.0,
    )


def _trace(args: argparse.Namespace) -> "Trace":
    from jaxllm.simulation.trace import make_trace, read_trace

    if args.trace is None:
        return make_trace(
            args.num_requests or 1000,
            requests_per_second=args.request_rate or math.inf,
            burstiness=args.burstiness,
            input_len=args.input_len,
            output_len=args.output_len,
            spread=args.spread,
            num_prefixes=args.num_prefixes,
            prefix_len=args.prefix_len,
            seed=args.seed,
        )
    trace = read_trace(args.trace)
    if args.num_requests is not None:
        trace = trace.head(args.num_requests)
    return trace if args.request_rate is None else trace.at_rate(args.request_rate)


def _simulate(
    args: argparse.Namespace,
    trace: "Trace",
    deployment: "Deployment",
    num_replicas: int,
    goals: dict[str, float],
) -> "Summary":
    from jaxllm.simulation.autoscaling import Autoscaler, AutoscalingRules
    from jaxllm.simulation.report import summarize
    from jaxllm.simulation.simulator import simulate

    autoscaler = None
    if args.autoscaling_config is not None:
        autoscaler = Autoscaler(AutoscalingRules.read(args.autoscaling_config))
        num_replicas = autoscaler.target

    def show(num_finished: int) -> None:
        if sys.stderr.isatty() and num_finished % 100 == 0:
            line = f"\r\033[K{counted(num_replicas, 'replica')}: {num_finished} of {len(trace)}"
            print(line, end="", file=sys.stderr, flush=True)

    outcome = simulate(
        trace,
        deployment,
        num_replicas,
        scheduling_policy=args.scheduling_policy,
        async_scheduling=args.async_scheduling,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        enable_prefix_caching=args.enable_prefix_caching,
        routing_policy=args.routing_policy,
        max_ongoing_requests=args.max_ongoing_requests,
        autoscaler=autoscaler,
        startup_s=args.startup_s or 0.0,
        on_progress=show,
    )
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return summarize(
        trace,
        outcome,
        chips_per_replica=deployment.num_chips,
        goals_ms=goals,
        price_per_chip_hour=args.price_per_chip_hour,
    )


def _fewest(
    args: argparse.Namespace, trace: "Trace", deployment: "Deployment", goals: dict[str, float]
) -> "Summary":
    """Double the replicas until they are enough, then bisect. More replicas serve requests worse
    only by chance, so the result may be off by one."""
    enough: Summary | None = None
    low, high = 0, args.replicas
    while enough is None or high - low > 1:
        num = high if enough is None else (low + high) // 2
        summary = _simulate(args, trace, deployment, num, goals)
        assert summary.good_share is not None, goals
        if summary.good_share >= args.find_replicas:
            enough, high = summary, num
        elif enough is not None:
            low = num
        elif num >= len(trace):
            raise ValidationError(
                f"a replica for each request serves {summary.good_share:.2%} of them within "
                "--goodput; faster steps are needed, not more of them"
            )
        else:
            low, high = num, min(2 * num, len(trace))
    return enough


def _goals(texts: list[str]) -> dict[str, float]:
    goals = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            goals[name] = math.nan
        if name not in _GOALS or not goals[name] > 0:
            raise refused("goodput", text, f"write NAME:MS, with a name of {', '.join(_GOALS)}")
    return goals
