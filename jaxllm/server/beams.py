"""Beam search behind a server: each step asks the engine for one token of every beam."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import msgspec

from jaxllm.frontend.async_llm_engine import AsyncLLMEngine
from jaxllm.frontend.beam_search import Search, check_beams, refuse_media, step_params_of
from jaxllm.frontend.input_processor import ProcessedInput
from jaxllm.messages import EngineInfo
from jaxllm.openai.errors import AnswerError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.prompts import TokensPrompt
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from jaxllm.server.merged import merged


def beam_ids(request_id: str, params: BeamSearchParams) -> list[str]:
    """The ids of a search's requests in the engine, the same at every step."""
    return [f"{request_id}-{place}" for place in range(params.beam_width)]


def fitting(params: BeamSearchParams, prompt: ProcessedInput, info: EngineInfo) -> BeamSearchParams:
    """The search behind a prompt, no longer than the context has room; raise ValidationError if the
    engine cannot do it."""
    room = info.max_model_len - len(prompt.prompt_token_ids)
    fits = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, room))
    check_beams(fits, info, len(prompt.prompt_token_ids))
    refuse_media([prompt.requests[0]])
    return fits


async def search(
    engine: AsyncLLMEngine, prompt: ProcessedInput, params: BeamSearchParams, priority: int
) -> AsyncGenerator[RequestOutput, None]:
    """Yield one output, with the best beams as answers. If a request of it is aborted, the search
    ends as it is, with this finish reason."""
    salt, step_params = prompt.requests[0].cache_salt, step_params_of(params)
    beams = Search(prompt.prompt_token_ids, salt, params, engine.eos_token_ids)
    ids, is_aborted = beam_ids(prompt.request_id, params), False
    for _ in range(params.max_tokens):
        prompts = beams.prompts
        if not prompts:
            break
        process = partial(_process, engine, prompt, ids, prompts, step_params, priority)
        size = sum(len(one["prompt_token_ids"]) for one in prompts)
        inputs = await engine.in_tokenizer_thread(process, size)
        outputs = await _answers(engine, inputs)
        reasons = {output.outputs[0].finish_reason for output in outputs}
        if "error" in reasons:
            raise AnswerError("the engine could not finish the search")
        is_aborted = "abort" in reasons
        if is_aborted:
            break
        beams.advance(outputs)
    yield _output(engine, prompt, beams, params, is_aborted)


def _process(
    engine: AsyncLLMEngine,
    of: ProcessedInput,
    ids: list[str],
    prompts: list[TokensPrompt],
    params: SamplingParams,
    priority: int,
) -> list[ProcessedInput]:
    return [
        engine.process_input(name, prompt, params, priority=priority, lora_request=of.lora_request)
        for name, prompt in zip(ids, prompts, strict=False)
    ]


async def _answers(engine: AsyncLLMEngine, inputs: list[ProcessedInput]) -> list[RequestOutput]:
    last: dict[int, RequestOutput] = {}
    async with aclosing(merged([engine.submit(one) for one in inputs])) as outputs:
        async for place, output in outputs:
            last[place] = output
    return [last[place] for place in range(len(inputs))]


def _output(
    engine: AsyncLLMEngine,
    prompt: ProcessedInput,
    beams: Search,
    params: BeamSearchParams,
    is_aborted: bool,
) -> RequestOutput:
    answers = []
    for index, beam in enumerate(beams.best().sequences):
        token_ids = beam.tokens[len(prompt.prompt_token_ids) :]
        text = ""
        if engine.tokenizer is not None:
            text = engine.tokenizer.decode(
                token_ids,
                skip_special_tokens=params.skip_special_tokens,
                prompt_token_ids=prompt.prompt_token_ids,
            )
        answers.append(
            CompletionOutput(
                index=index,
                text=text,
                token_ids=token_ids,
                cumulative_logprob=beam.cum_logprob,
                finish_reason="abort" if is_aborted else beam.finish_reason,
                stop_reason=beam.stop_reason,
            )
        )
    return RequestOutput(
        request_id=prompt.request_id,
        prompt=prompt.prompt,
        prompt_token_ids=prompt.prompt_token_ids,
        prompt_logprobs=None,
        outputs=answers,
        finished=True,
    )
