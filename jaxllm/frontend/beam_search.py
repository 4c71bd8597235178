"""Beam search on top of the engine: every step requests the most likely next tokens of each beam.

The prefix cache makes that cheap: it has a beam's keys and values from the step before.
"""

import itertools
from collections.abc import Callable, Iterable

from jaxllm.errors import JaxLLMError, ValidationError, refused
from jaxllm.messages import EngineInfo, EngineRequest
from jaxllm.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from jaxllm.prompts import TokensPrompt
from jaxllm.sampling_params import BeamSearchParams, SamplingParams

Generate = Callable[[list[TokensPrompt], SamplingParams], list[RequestOutput]]


def beam_search(
    prompts: list[list[int]],
    salts: list[str | None],
    params: BeamSearchParams,
    info: EngineInfo,
    eos_token_ids: list[int],
    generate: Generate,
    *,
    concurrency_limit: int | None = None,
    on_step: Callable[[], None] | None = None,
) -> list[BeamSearchOutput]:
    """Search the prompts side by side, `concurrency_limit` at a time. Return the best `beam_width`
    sequences of each, best first.

    `salts` are the prompts' cache salts. `on_step` is called after every step.
    """
    if concurrency_limit is None:
        concurrency_limit = max(1, len(prompts))
    is_count = isinstance(concurrency_limit, int) and not isinstance(concurrency_limit, bool)
    if not is_count or concurrency_limit < 1:
        raise refused("concurrency_limit", concurrency_limit, "it must be an integer, at least 1")
    for prompt in prompts:
        check_beams(params, info, len(prompt))
    step_params = step_params_of(params)
    searches = [
        Search(prompt, salt, params, eos_token_ids)
        for prompt, salt in zip(prompts, salts, strict=True)
    ]
    for start in range(0, len(searches), concurrency_limit):
        batch = searches[start : start + concurrency_limit]
        for _ in range(params.max_tokens):
            if not any(search.beams for search in batch):
                break
            of_beams = [prompt for search in batch for prompt in search.prompts]
            outputs = generate(of_beams, step_params)
            answers = iter(outputs)
            for search in batch:
                search.advance(list(itertools.islice(answers, len(search.beams))))
            if on_step is not None:
                on_step()
    return [search.best() for search in searches]


def check_beams(params: BeamSearchParams, info: EngineInfo, prompt_len: int) -> None:
    """Refuse a search that the engine cannot do."""
    width = params.beam_width
    if 2 * width > info.max_logprobs:
        raise ValidationError(
            f"beam_width={width} needs {2 * width} logprobs per step, but "
            f"max_logprobs={info.max_logprobs}; start the engine with max_logprobs={2 * width}",
            parameter="beam_width",
            value=width,
        )
    if prompt_len + params.max_tokens > info.max_model_len:
        raise ValidationError(
            f"max_tokens={params.max_tokens} with a {prompt_len}-token prompt exceeds "
            f"max_model_len={info.max_model_len}; lower max_tokens",
            parameter="max_tokens",
            value=params.max_tokens,
        )


def refuse_media(requests: Iterable[EngineRequest]) -> None:
    """Refuse a search behind images, videos or embeddings: the prompts of its steps are tokens."""
    requests = list(requests)
    if any(request.embeds is not None for request in requests):
        raise ValidationError(
            "prompt_embeds: a beam search is not supported with embeddings; sample instead",
            parameter="prompt_embeds",
        )
    if any(request.images for request in requests):
        raise ValidationError(
            "multi_modal_data: a beam search is not supported with images or videos; sample "
            "instead",
            parameter="multi_modal_data",
        )


def step_params_of(params: BeamSearchParams) -> SamplingParams:
    """What the engine is asked for at every step of every beam."""
    return SamplingParams(
        max_tokens=1,
        temperature=params.temperature,
        logprobs=2 * params.beam_width,
        ignore_eos=True,  # an end of sequence is one candidate among others
        detokenize=False,
    )


class Search:
    """The beams of one prompt. Each step asks the engine for the next token of `prompts`, and gives
    the answers to `advance`."""

    def __init__(
        self,
        prompt: list[int],
        salt: str | None,
        params: BeamSearchParams,
        eos_token_ids: list[int],
    ):
        self._salt = salt
        self._params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.beams = [BeamSearchSequence(tokens=prompt, logprobs=[])]
        self._ended: list[BeamSearchSequence] = []

    @property
    def prompts(self) -> list[TokensPrompt]:
        """The beams as prompts; none if all have ended."""
        salt = TokensPrompt(prompt_token_ids=[])
        if self._salt is not None:
            salt["cache_salt"] = self._salt
        return [{**salt, "prompt_token_ids": beam.tokens} for beam in self.beams]

    def advance(self, outputs: list[RequestOutput]) -> None:
        """Replace the beams by the best of their continuations."""
        continued = []
        for beam, output in zip(self.beams, outputs, strict=True):
            answer = output.outputs[0]
            if answer.finish_reason == "error":
                raise JaxLLMError(f"beam search cannot go on: {answer.stop_reason}")
            logprobs = answer.logprobs
            assert logprobs, output
            for token, logprob in logprobs[0].items():
                ends = token in self._eos
                shown = not ends or self._params.include_stop_str_in_output
                sequence = BeamSearchSequence(
                    tokens=[*beam.tokens, token] if shown else beam.tokens,
                    logprobs=[*beam.logprobs, logprobs[0]],
                    cum_logprob=beam.cum_logprob + logprob.logprob,
                    finish_reason="stop" if ends else None,
                    stop_reason=token if ends else None,
                )
                (self._ended if ends else continued).append(sequence)
        self.beams = sorted(continued, key=self._score, reverse=True)[: self._params.beam_width]

    def best(self) -> BeamSearchOutput:
        for beam in self.beams:
            beam.finish_reason = "length"
        ranked = sorted([*self._ended, *self.beams], key=self._score, reverse=True)
        return BeamSearchOutput(sequences=ranked[: self._params.beam_width])

    def _score(self, sequence: BeamSearchSequence) -> float:
        """The log probability divided by a power of the length. An end of sequence counts for the
        probability and not for the length."""
        length = len(sequence.tokens)
        if sequence.finish_reason == "stop" and self._params.include_stop_str_in_output:
            length -= 1
        return sequence.cum_logprob / length**self._params.length_penalty
