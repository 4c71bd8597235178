"""`jaxllm bench throughput`: an engine in this process, with all requests at once."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from jaxllm.bench.datasets import BenchRequest, make_requests
from jaxllm.bench.lengths import decided
from jaxllm.bench.options import DatasetOptions
from jaxllm.config import EngineConfig
from jaxllm.errors import JaxLLMError, ValidationError
from jaxllm.frontend.async_llm_engine import AsyncLLMEngine
from jaxllm.frontend.tokenizer import Tokenizer
from jaxllm.llm import LLM
from jaxllm.outputs import RequestOutput
from jaxllm.plural import counted
from jaxllm.sampling_params import RequestOutputKind, SamplingParams


def bench_throughput(
    config: EngineConfig, data: DatasetOptions, *, n: int = 1, use_async_engine: bool = False
) -> dict[str, Any]:
    """Answer the requests of a data set and measure the time."""
    data.validate()
    if use_async_engine:
        return asyncio.run(_through_async_engine(config, data, n))
    llm = LLM.from_engine_args(config)
    data = decided(data, llm.llm_engine.info.max_model_len)
    requests = make_requests(data, _tokenizer(llm.llm_engine.tokenizer))
    params = [_sampling(request, n) for request in requests]
    prompts = [request.prompt for request in requests]
    llm.generate(prompts[0], params[0], use_tqdm=False)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return _result(outputs, time.perf_counter() - start)


async def _through_async_engine(
    config: EngineConfig, data: DatasetOptions, n: int
) -> dict[str, Any]:
    engine = AsyncLLMEngine(config)
    try:
        data = decided(data, engine.info.max_model_len)
        requests = make_requests(data, _tokenizer(engine.tokenizer))

        async def answer(number: int, request: BenchRequest) -> RequestOutput:
            params = _sampling(request, n)
            last = None
            async for output in engine.generate(request.prompt, params, str(number)):
                last = output
            assert last is not None, "an answer has a last output"
            return last

        await answer(-1, requests[0])
        start = time.perf_counter()
        outputs = await asyncio.gather(*map(answer, range(len(requests)), requests))
        return _result(outputs, time.perf_counter() - start)
    finally:
        engine.shutdown()


def _sampling(request: BenchRequest, n: int) -> SamplingParams:
    return SamplingParams(
        n=n,
        temperature=1.0,
        max_tokens=request.output_len,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise ValidationError("prompts are made by the tokenizer; leave --skip-tokenizer-init out")
    return tokenizer


def _result(outputs: Sequence[RequestOutput], seconds: float) -> dict[str, Any]:
    answers = [answer for output in outputs for answer in output.outputs]
    failed = [answer for answer in answers if answer.finish_reason in ("error", "abort")]
    if failed:
        raise JaxLLMError(
            f"{counted(len(failed), 'answer')} ended in an error: {failed[0].stop_reason}"
        )
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(answer.token_ids) for answer in answers)
    return {
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_num_tokens": num_prompt + num_output,
        "total_prompt_tokens": num_prompt,
        "total_output_tokens": num_output,
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": (num_prompt + num_output) / seconds,
        "output_tokens_per_second": num_output / seconds,
    }
