"""`jaxllm bench latency`: the time of one batch, measured repeatedly."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.config import EngineConfig, option
from jaxllm.errors import JaxLLMError, refused
from jaxllm.llm import LLM
from jaxllm.prompts import TokensPrompt
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

_PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """Batch"""

    input_len: int = option(32, "Tokens of each prompt.")
    output_len: int = option(128, "Tokens of each answer.")
    batch_size: int = option(8, "Number of prompts.")
    n: int = option(1, "Answers per prompt.")
    num_iters_warmup: int = option(10, "Runs before those that are measured.")
    num_iters: int = option(30, "Runs that are measured.")
    disable_detokenize: bool = option(False, "Leave the answers as tokens.")

    def validate(self) -> None:
        for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
            if getattr(self, name) < 1:
                raise refused(name, getattr(self, name), "it must be 1 or more")
        if self.num_iters_warmup < 0:
            raise refused("num_iters_warmup", self.num_iters_warmup, "it must be 0 or more")


def bench_latency(config: EngineConfig, options: LatencyOptions) -> dict[str, Any]:
    """Time a batch of random prompts."""
    options.validate()
    llm = LLM.from_engine_args(config)
    params = SamplingParams(
        n=options.n,
        temperature=1.0,
        max_tokens=options.output_len,
        ignore_eos=True,
        detokenize=not options.disable_detokenize,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    rng = np.random.default_rng(config.model.seed)
    shape = (options.batch_size, options.input_len)
    # All runs have the same prompts, as in vLLM's benchmark.
    ids = rng.integers(llm.llm_engine.info.vocab_size, size=shape).tolist()
    prompts = [TokensPrompt(prompt_token_ids=one) for one in ids]

    def run() -> float:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        for output in outputs:
            for answer in output.outputs:
                if answer.finish_reason != "length":
                    raise JaxLLMError(f"an answer ended early: {answer.stop_reason}")
        return seconds

    for _ in range(options.num_iters_warmup):
        run()
    latencies = [run() for _ in range(options.num_iters)]
    return {
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": {str(p): float(np.percentile(latencies, p)) for p in _PERCENTILES},
    }
