"""The result of a run as text, and the file that stores it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxllm.bench.figures import METRICS, percentile_name

_TOTALS = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Duration (s)",
    "total_input_tokens": "Input tokens",
    "total_output_tokens": "Output tokens",
    "request_throughput": "Requests per second",
    "request_goodput": "Good requests per second",
    "output_throughput": "Output tokens per second",
    "max_output_tokens_per_s": "Most of them in a second",
    "total_token_throughput": "Input and output tokens per second",
    "max_concurrent_requests": "Most requests under way at once",
}


def as_text(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """Format the table that the command prints."""
    lines = []
    for key, label in _TOTALS.items():
        if result[key] is not None:
            lines.append(f"{label:<36}{_number(result[key]):>12}")
    kinds = ["mean", "median", "std", *map(percentile_name, percentiles)]
    for metric in metrics:
        lines += ["", f"{METRICS[metric]} (ms)"]
        for kind in kinds:
            value = result[f"{kind}_{metric}_ms"]
            shown = "-" if value is None else _number(value)
            lines.append(f"  {kind:<34}{shown:>12}")
    if result["error_counts"]:
        lines += ["", "Why requests failed"]
        lines += [f"  {count} x {error}" for error, count in result["error_counts"].items()]
    return "\n".join(lines)


def default_name(result: Mapping[str, Any]) -> str:
    """A file name with the setup and the date of the run."""
    parts = [result["backend"], f"{result['request_rate']}qps"]
    if result["max_concurrency"] is not None:
        parts.append(f"concurrency{result['max_concurrency']}")
    parts += [Path(result["model_id"]).name, result["date"]]
    return "-".join(parts) + ".json"


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
