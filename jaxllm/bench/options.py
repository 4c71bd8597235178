"""The options of a benchmark. Flags are generated from the fields; names are vLLM's."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from jaxllm.bench.figures import METRICS
from jaxllm.config import option
from jaxllm.errors import refused

# vLLM's default lengths of random requests. `lengths` shortens them for a short context.
DEFAULT_LENGTHS = {
    "random_input_len": 1024,
    "random_output_len": 128,
    "prefix_repetition_prefix_len": 256,
    "prefix_repetition_suffix_len": 256,
    "prefix_repetition_output_len": 128,
}


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Requests"""

    dataset_name: Literal["random", "sharegpt", "custom", "prefix_repetition"] = option(
        "random",
        "Where prompts come from: random tokens; a file of ShareGPT's conversations; a file of "
        'lines {"prompt": ..., "output_tokens": ...}; or random suffixes to a few prefixes.',
    )
    dataset_path: str | None = option(None, "File of --dataset-name sharegpt or custom.")
    num_prompts: int = option(1000, "Number of requests.")
    seed: int = option(0, "Seed of what is random in prompts and arrivals.")
    input_len: int | None = option(None, "The same as --random-input-len.")
    output_len: int | None = option(None, "Output tokens of every request, whatever the dataset.")
    random_input_len: int | None = option(
        None, "Tokens of a random prompt (default: 1024, or what the model has room for)."
    )
    random_output_len: int | None = option(
        None,
        "Output tokens of a request with a random prompt (default: 128, or what it has room for).",
    )
    random_range_ratio: float = option(
        0.0, "Let both vary evenly by up to this part of them, up and down; less than 1."
    )
    random_prefix_len: int = option(0, "Tokens before every random prompt, the same for all.")
    custom_output_len: int = option(256, "Output tokens where a line of the file says nothing.")
    prefix_repetition_prefix_len: int | None = option(
        None, "Tokens of each prefix (default: 256, or what the model has room for)."
    )
    prefix_repetition_suffix_len: int | None = option(
        None, "Tokens of each suffix (default: 256, or what it has room for)."
    )
    prefix_repetition_num_prefixes: int = option(10, "Number of prefixes.")
    prefix_repetition_output_len: int | None = option(
        None, "Output tokens of such a request (default: 128, or what it has room for)."
    )

    def validate(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("seed", "random_prefix_len") else 1
            if isinstance(value, int) and value < least:
                raise refused(name, value, f"it must be {least} or more")
        if not 0 <= self.random_range_ratio < 1:
            raise refused("random_range_ratio", self.random_range_ratio, "it must be in [0, 1)")
        needs_file = self.dataset_name in ("sharegpt", "custom")
        if needs_file and self.dataset_path is None:
            raise refused("dataset_path", None, f"--dataset-name {self.dataset_name} needs a file")
        if not needs_file and self.dataset_path is not None:
            raise refused(
                "dataset_path",
                self.dataset_path,
                f"--dataset-name {self.dataset_name} reads no file; give sharegpt or custom",
            )


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Server and load"""

    backend: Literal["openai", "openai-chat", "vllm"] = option(
        "openai", "Completions, or chat completions; vllm is another name of openai."
    )
    base_url: str | None = option(None, "Address of the server (default: from --host and --port).")
    host: str = option("127.0.0.1", "Host of the server.")
    port: int = option(8000, "Port of the server.")
    endpoint: str | None = option(
        None, "Path (default: /v1/completions or /v1/chat/completions, as the backend says)."
    )
    model: str | None = option(None, "Model to ask for (default: the first that the server has).")
    served_model_name: str | None = option(
        None, "Its name in requests, where --model is only where to find the tokenizer."
    )
    tokenizer: str | None = option(
        None, "Directory or hub name of the tokenizer that makes prompts (default: the model's)."
    )
    api_key: str | None = option(
        None,
        "Key, sent as `Authorization: Bearer KEY` (default: what OPENAI_API_KEY says). Other users "
        "of the machine can see flags, but no files or environment.",
    )
    header: tuple[str, ...] = option((), "More headers, each as NAME=VALUE.")
    insecure: bool = option(False, "Accept any certificate of an https server.")
    request_rate: float = option(math.inf, "Requests per second; inf sends all at once.")
    burstiness: float = option(
        1.0,
        "Shape of the gamma distribution of the time between requests: 1 is a Poisson process, "
        "less comes in bursts, more is more even.",
    )
    ramp_up_strategy: Literal["linear", "exponential"] | None = option(
        None, "Let the rate grow from --ramp-up-start-rps to --ramp-up-end-rps."
    )
    ramp_up_start_rps: float | None = option(None, "Rate of the first request.")
    ramp_up_end_rps: float | None = option(None, "Rate of the last request.")
    max_concurrency: int | None = option(
        None, "Most requests under way; others wait, unsent, and their time has not begun."
    )
    request_timeout: float = option(21600.0, "Seconds after which a request has failed.")
    num_warmups: int = option(0, "Requests that are sent before, and not measured.")
    ready_check_timeout_sec: float = option(
        0.0, "Seconds for which the server may fail the first, unmeasured request."
    )
    ignore_eos: bool = option(False, "Generate all tokens asked for, past an end of sequence.")
    temperature: float = option(0.0, "Temperature of every request.")
    extra_body: dict[str, Any] | None = option(None, "More fields of every request.")

    def validate(self) -> None:
        for name in ("request_rate", "burstiness", "request_timeout"):
            if not getattr(self, name) > 0:
                raise refused(name, getattr(self, name), "it must be above 0")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise refused("max_concurrency", self.max_concurrency, "it must be positive")
        for header in self.header:
            if not header.partition("=")[2]:
                raise refused("header", header, "it must be NAME=VALUE")
        rates = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None and rates != (None, None):
            raise refused("ramp_up_start_rps", rates[0], "it needs --ramp-up-strategy")
        if self.ramp_up_strategy is not None:
            if self.request_rate != math.inf:
                raise refused("request_rate", self.request_rate, "a ramp has rates of its own")
            if any(rate is None or not rate > 0 for rate in rates):
                raise refused(
                    "ramp_up_strategy",
                    self.ramp_up_strategy,
                    "it needs --ramp-up-start-rps and --ramp-up-end-rps, both above 0",
                )


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Report"""

    percentile_metrics: str = option(
        "ttft,tpot,itl", f"What is printed, of {','.join(METRICS)}; the file has all."
    )
    metric_percentiles: str = option("99", "Percentiles, such as 50,90,99.")
    goodput: tuple[str, ...] = option(
        (), "Milliseconds that a good request keeps to, such as ttft:200 tpot:50."
    )
    save_result: bool = option(False, "Write the result as JSON.")
    save_detailed: bool = option(False, "Write the lengths and times of every request, too.")
    result_dir: str | None = option(None, "Where to (default: here).")
    result_filename: str | None = option(
        None, "Its name (default: from backend, rate, model and time)."
    )
    metadata: tuple[str, ...] = option((), "What else the result should say, each as NAME=VALUE.")
    plot: str | None = option(
        None, "SVG file to draw: how TTFT and ITL are distributed, and tokens over time."
    )

    def validate(self) -> None:
        self.shown_metrics()
        self.percentiles()
        self.goals()
        for pair in self.metadata:
            if "=" not in pair:
                raise refused("metadata", pair, "it must be NAME=VALUE")
        if self.plot is not None and not self.plot.endswith(".svg"):
            raise refused("plot", self.plot, "plots are SVG; end the name with .svg")

    def shown_metrics(self) -> list[str]:
        names = [name.strip() for name in self.percentile_metrics.split(",") if name.strip()]
        for name in names:
            _check_metric("percentile_metrics", name)
        return names

    def percentiles(self) -> list[float]:
        try:
            values = [float(text) for text in self.metric_percentiles.split(",")]
        except ValueError:
            values = [math.nan]
        if not all(0 <= value <= 100 for value in values):
            raise refused(
                "metric_percentiles", self.metric_percentiles, "numbers from 0 to 100, as 50,99"
            )
        return values

    def goals(self) -> dict[str, float]:
        """The upper limits of a good request in milliseconds, by metric."""
        goals = {}
        for pair in self.goodput:
            name, _, limit = pair.partition(":")
            _check_metric("goodput", name)
            try:
                goals[name] = float(limit)
            except ValueError:
                goals[name] = math.nan
            if not goals[name] >= 0:
                raise refused("goodput", pair, "it must be NAME:MILLISECONDS, as ttft:200")
            if name == "itl":
                raise refused("goodput", pair, "a request has many; give ttft, tpot or e2el")
        return goals


def _check_metric(parameter: str, name: str) -> None:
    if name not in METRICS:
        raise refused(parameter, name, f"there is no such metric; they are {', '.join(METRICS)}")
