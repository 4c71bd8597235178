"""`jaxllm bench serve`: sends a load to a server and measures the answers.

datasets ─► load (arrivals) ─► client ─► http ─► the server
                                 └─► Outcome ─► figures ─► report, plot
"""

import asyncio
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

from jaxllm.async_http import HTTPClient
from jaxllm.bench.client import OpenAIClient, find_model
from jaxllm.bench.datasets import BenchRequest, make_requests
from jaxllm.bench.figures import figures
from jaxllm.bench.lengths import decided, describe
from jaxllm.bench.load import Run, run_load, send_times, warm_up
from jaxllm.bench.options import DatasetOptions, LoadOptions, ReportOptions
from jaxllm.config import ModelConfig
from jaxllm.frontend.tokenizer import load_tokenizer
from jaxllm.logging import init_logger

logger = init_logger(__name__)

T = TypeVar("T")


class Measured(NamedTuple):
    """A run and its result for the file."""

    run: Run
    result: dict[str, Any]


def bench_serve(data: DatasetOptions, load: LoadOptions, report: ReportOptions) -> Measured:
    """Send the requests that the options describe, and measure the answers."""
    for options in (data, load, report):
        options.validate()
    return on_fast_loop(_bench_serve(data, load, report))


def on_fast_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop, which is faster."""
    import uvloop

    return uvloop.run(work)


async def _bench_serve(data: DatasetOptions, load: LoadOptions, report: ReportOptions) -> Measured:
    base_url = load.base_url or f"http://{_in_url(load.host)}:{load.port}"
    http = HTTPClient(base_url, _headers(load), insecure=load.insecure)
    served = await find_model(http, load.served_model_name or load.model)
    model = load.model or served.name
    tokenizer_name = load.tokenizer or load.model or served.source
    data = decided(data, served.max_model_len)
    if data.dataset_name in ("random", "prefix_repetition"):
        logger.info("requests: %s", describe(data))
    # Make the prompts before the clock runs, and in another thread than this loop's.
    requests = await asyncio.to_thread(_make_requests, data, tokenizer_name)
    _warn_of_long(requests, served.max_model_len)
    client = OpenAIClient.of(http, load, load.served_model_name or model)
    await warm_up(client, requests, load)
    times = send_times(load, len(requests), data.seed)
    with tqdm(total=len(requests), disable=not sys.stderr.isatty()) as bar:
        run = await run_load(client, requests, times, load.max_concurrency, bar.update)
    http.close()
    result = _described(data, load, report, model, tokenizer_name) | figures(
        run.outcomes, run.duration, report.percentiles(), report.goals()
    )
    return Measured(run, result)


def detailed(run: Run) -> dict[str, list[Any]]:
    """The columns that --save-detailed adds: one list per field, in the order of the requests."""
    columns = {
        "input_lens": "prompt_len",
        "output_lens": "output_len",
        "start_times": "start",
        "ttfts": "ttft",
        "itls": "itl",
        "generated_texts": "text",
        "errors": "error",
    }
    records = [asdict(outcome) for outcome in run.outcomes]
    return {name: [record[key] for record in records] for name, key in columns.items()}


def _make_requests(data: DatasetOptions, tokenizer_name: str) -> list[BenchRequest]:
    tokenizer = load_tokenizer(ModelConfig(model=tokenizer_name), tokenizer_name)
    return make_requests(data, tokenizer)


def _warn_of_long(requests: Sequence[BenchRequest], max_model_len: int | None) -> None:
    """Warn of requests that exceed the context. Requests from files can."""
    if max_model_len is None:
        return
    long = [r for r in requests if r.prompt_len + r.output_len > max_model_len]
    if long:
        logger.warning(
            "%d of %d requests ask for more tokens than the model has room for (max_model_len=%d), "
            "up to %d; --output-len sets what each answer may have",
            len(long),
            len(requests),
            max_model_len,
            max(r.prompt_len + r.output_len for r in long),
        )


def _described(
    data: DatasetOptions, load: LoadOptions, report: ReportOptions, model: str, tokenizer: str
) -> dict[str, Any]:
    rate = load.request_rate
    described: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": load.backend,
        "backend": load.backend,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "dataset_name": data.dataset_name,
        "num_prompts": data.num_prompts,
        "seed": data.seed,
        "request_rate": "inf" if rate == float("inf") else rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
    }
    if load.ramp_up_strategy is not None:
        described |= {
            "ramp_up_strategy": load.ramp_up_strategy,
            "ramp_up_start_rps": load.ramp_up_start_rps,
            "ramp_up_end_rps": load.ramp_up_end_rps,
        }
    return described | dict(pair.split("=", 1) for pair in report.metadata)


def _headers(load: LoadOptions) -> dict[str, str]:
    given = dict(pair.split("=", 1) for pair in load.header)
    return given if load.api_key is None else {"Authorization": f"Bearer {load.api_key}", **given}


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
