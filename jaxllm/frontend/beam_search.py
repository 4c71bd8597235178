"""Beam search on top of the engine: every step requests the most likely next tokens of each beam.

The prefix cache makes that cheap: it has a beam's keys and values from the step before.
"""

import itertools
from collections.abc import Callable

from jaxllm.errors import JaxLLMError, ValidationError, refused
from jaxllm.messages import EngineInfo
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
    if 2 * params.beam_width > info.max_logprobs:
        raise ValidationError(
            f"beam_width={params.beam_width} needs {2 * params.beam_width} logprobs per step, but "
            f"max_logprobs={info.max_logprobs}; start the engine with "
            f"max_logprobs={2 * params.beam_width}",
            parameter="beam_width",
            value=params.beam_width,
        )
    for prompt in prompts:
        if len(prompt) + params.max_tokens > info.max_model_len:
            raise ValidationError(
                f"max_tokens={params.max_tokens} with a {len(prompt)}-token prompt exceeds "
                f"max_model_len={info.max_model_len}; lower max_tokens",
                parameter="max_tokens",
                value=params.max_tokens,
            )
    step_params = SamplingParams(
        max_tokens=1,
        temperature=params.temperature,
        logprobs=2 * params.beam_width,
        ignore_eos=True,  # an end of sequence is one candidate among others
        detokenize=False,
    )
    searches = [
        _Search(prompt, salt, params, eos_token_ids)
        for prompt, salt in zip(prompts, salts, strict=True)
    ]
    for start in range(0, len(searches), concurrency_limit):
        batch = searches[start : start + concurrency_limit]
        for _ in range(params.max_tokens):
            beams = [(search, beam) for search in batch for beam in search.beams]
            if not beams:
                break
            outputs = generate([search.prompt_of(beam) for search, beam in beams], step_params)
            answers = iter(outputs)
            for search in batch:
                search.advance(list(itertools.islice(answers, len(search.beams))))
            if on_step is not None:
                on_step()
    return [search.best() for search in searches]


class _Search:
    """The beams of one prompt."""

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

    def prompt_of(self, beam: BeamSearchSequence) -> TokensPrompt:
        prompt = TokensPrompt(prompt_token_ids=beam.tokens)
        if self._salt is not None:
            prompt["cache_salt"] = self._salt
        return prompt

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
