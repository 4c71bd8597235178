"""LLM: offline batch inference, as a loop around `LLMEngine`."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from tqdm import tqdm

from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError, refused
from jaxllm.frontend.beam_search import beam_search, refuse_media
from jaxllm.frontend.calls import Calls
from jaxllm.frontend.input_processor import ProcessedInput, tokenization_options
from jaxllm.frontend.llm_engine import LLMEngine
from jaxllm.frontend.many_prompts import OF_A_PROMPT, as_prompts, for_each, located
from jaxllm.frontend.pooled import converted, named_prompts
from jaxllm.frontend.pooling_length import TextOptions, TextPair
from jaxllm.frontend.progress_bar import Bar
from jaxllm.frontend.prompt_length import PromptLength
from jaxllm.frontend.scoring import pair_renderer, plan_scores, scored
from jaxllm.frontend.tokenizer import render_chat
from jaxllm.lora.request import LoRARequest
from jaxllm.metrics.reader import Metric, read_metrics
from jaxllm.outputs import (
    BeamSearchOutput,
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from jaxllm.pooling_params import POOLING_TASKS, PoolingParams, PoolingTask
from jaxllm.prompts import PromptType
from jaxllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

Messages = list[dict[str, Any]]
OneOrEach = SamplingParams | Sequence[SamplingParams]
OneOrEachAdapter = LoRARequest | None | Sequence[LoRARequest | None]


class LLM:
    """A model, ready to answer batches of prompts.

    It takes the fields of EngineConfig as keyword arguments, with vLLM's names. An unknown name is
    an error that suggests the nearest one. The default model is the bundled one.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **engine_options: Any):
        self.llm_engine = LLMEngine(EngineConfig.create(model, **engine_options))
        self._calls = Calls(self.llm_engine)
        self._queued: list[str] = []  # ids of `enqueue` that no call has waited for yet

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "LLM":
        llm = cls.__new__(cls)
        llm.llm_engine = LLMEngine(engine_args)
        llm._calls, llm._queued = Calls(llm.llm_engine), []
        return llm

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: OneOrEach | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: OneOrEachAdapter = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts; the results are in the order of the prompts. An answer that a failed
        step was computing has the finish_reason 'error'; the others are complete."""
        ids = self._submit(
            as_prompts(prompts), sampling_params, priority, tokenization_kwargs, lora_request
        )
        return self._calls.wait(ids, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: OneOrEach | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: OneOrEachAdapter = None,
        *,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several. The template gets `tools`. The model's text
        is returned as it is; an `AnswerFormat` can find calls and reasoning in it."""
        if self.llm_engine.tokenizer is None:
            raise ValidationError("chat needs a tokenizer, but skip_tokenizer_init=True")
        if not isinstance(messages, list | tuple):
            raise refused("messages", messages, "it must be a list of messages, or several lists")
        if not messages:
            raise ValidationError("messages is empty; give at least one", parameter="messages")
        several = messages if isinstance(messages[0], list | tuple) else [messages]
        length = PromptLength.of(
            self.llm_engine.info.max_model_len,
            tokenization_options(tokenization_kwargs).get("truncate_prompt_tokens"),
        )
        prompts = []
        for index, conversation in enumerate(several):
            try:
                prompt = render_chat(
                    self.llm_engine.tokenizer,
                    cast(Messages, conversation),
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    chat_template_kwargs=chat_template_kwargs,
                    length=length,
                )
            except ValidationError as error:
                raise located(error, "messages", index, len(several)) from error
            prompts.append(prompt)
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
        )

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: OneOrEachAdapter = None,
        pooling_task: PoolingTask | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput | None]]:
        """Pool all prompts. A task names what is wanted: 'embed', 'classify', and 'token_embed' or
        'token_classify', for one vector at each token."""
        if pooling_task is None and pooling_params is None:
            raise refused("pooling_task", None, f"give one of {', '.join(POOLING_TASKS)}")
        return self._pool(
            as_prompts(prompts),
            pooling_params,
            pooling_task,
            use_tqdm,
            tokenization_kwargs,
            lora_request,
        )

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: OneOrEachAdapter = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Turn each prompt into a vector. `prompt_name` puts the model's own words for a purpose,
        such as 'query', before each text."""
        given = named_prompts(self.llm_engine.pooling_input.pooling, prompt_name, prompts)
        outputs = self._pool(
            given, pooling_params, "embed", use_tqdm, tokenization_kwargs, lora_request
        )
        return [converted(one, lambda data: EmbeddingOutput(data.tolist())) for one in outputs]

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: OneOrEachAdapter = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Tell the probabilities of the classes of each prompt."""
        given = as_prompts(prompts)
        outputs = self._pool(
            given, pooling_params, "classify", use_tqdm, tokenization_kwargs, lora_request
        )
        return [converted(one, lambda data: ClassificationOutput(data.tolist())) for one in outputs]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Tell how well texts go together: one with each of several, or pair by pair. The template
        gets messages of the roles 'query' and 'document'."""
        engine = self.llm_engine
        queries, documents = ([one] if isinstance(one, str) else one for one in (data_1, data_2))
        render = None if chat_template is None else pair_renderer(engine.tokenizer, chat_template)
        scoring = plan_scores(engine.pooling_input.pooling, queries, documents, render)
        outputs = self._pool(
            scoring.prompts,
            pooling_params,
            scoring.task,
            use_tqdm,
            tokenization_kwargs,
            lora_request,
        )
        return scored(scoring, outputs)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool | Callable[..., tqdm] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the `beam_width` likeliest answers to each prompt, best first. At most
        `concurrency_limit` prompts are searched at once."""
        if not isinstance(params, BeamSearchParams):
            raise refused("params", params, "it must be a BeamSearchParams")
        engine, prompts = self.llm_engine, as_prompts(prompts)
        processed = self._process(prompts, SamplingParams(), None, None, lora_request)
        refuse_media(one.requests[0] for one in processed)
        token_ids = [one.prompt_token_ids for one in processed]
        with contextlib.closing(Bar(use_tqdm, desc="Beam search", unit="token")) as bar:
            outputs = beam_search(
                token_ids,
                [one.requests[0].cache_salt for one in processed],
                params,
                engine.info,
                engine.eos_token_ids,
                lambda step_prompts, step_params: self.generate(
                    step_prompts, step_params, use_tqdm=False, lora_request=lora_request
                ),
                concurrency_limit=concurrency_limit,
                on_step=bar.advance,
            )
        if engine.tokenizer is not None:
            for output, prompt in zip(outputs, token_ids, strict=True):
                for sequence in output.sequences:
                    sequence.text = engine.tokenizer.decode(
                        sequence.tokens[len(prompt) :],
                        skip_special_tokens=params.skip_special_tokens,
                        prompt_token_ids=prompt,
                    )
        return outputs

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: OneOrEach | None = None,
        *,
        lora_request: OneOrEachAdapter = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts without waiting; `wait_for_completion` returns the results."""
        ids = self._submit(
            as_prompts(prompts), sampling_params, priority, tokenization_kwargs, lora_request
        )
        self._queued += ids
        return ids

    def wait_for_completion(
        self, *, use_tqdm: bool | Callable[..., tqdm] = True
    ) -> list[RequestOutput]:
        """Run until all queued prompts are finished; return results in the order of queueing."""
        ids, self._queued = self._queued, []
        return self._calls.wait(ids, use_tqdm)

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The default parameters of `generate`: those of the model's generation_config.json."""
        return self.llm_engine.info.default_sampling_params.clone()

    def get_metrics(self) -> list[Metric]:
        """The figures of the engine, with the names of /metrics."""
        engine = self.llm_engine
        return read_metrics(engine.replica_stats(), engine.info.model)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prompt blocks; False when some are in use."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Free memory until `wake_up`. Level 1 moves the weights to the host's memory and drops the
        KV cache, level 2 drops the weights too, and level 0 only pauses. Queued prompts wait (mode
        'keep') or end ('abort')."""
        self.llm_engine.sleep(level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back and go on. Tags name the parts: 'weights', 'kv_cache', 'scheduling'."""
        self.llm_engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether a part of the engine sleeps, so that it computes nothing."""
        return self.llm_engine.is_sleeping()

    def start_profile(self) -> None:
        """Begin a profile, for TensorBoard or xprof, in the directory `profile_dir`."""
        self.llm_engine.start_profile()

    def stop_profile(self) -> None:
        """End the profile and write it out."""
        self.llm_engine.stop_profile()

    def shutdown(self) -> None:
        """Free the devices' memory."""
        self.llm_engine.shutdown()

    def _submit(
        self,
        prompts: Sequence[PromptType],
        sampling_params: OneOrEach | None,
        priority: int | Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        lora_request: OneOrEachAdapter,
    ) -> list[str]:
        """Validate all prompts, then queue them all: if one is refused, none is queued."""
        return self._calls.queue(
            self._process(prompts, sampling_params, priority, tokenization_kwargs, lora_request)
        )

    def _process(
        self,
        prompts: Sequence[PromptType],
        sampling_params: OneOrEach | None,
        priority: int | Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        lora_request: OneOrEachAdapter,
    ) -> list[ProcessedInput]:
        """Validate and tokenise all prompts. An error names the prompt if there are several."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        all_params = for_each("sampling_params", sampling_params, len(prompts))
        priorities = for_each("priority", 0 if priority is None else priority, len(prompts))
        adapters = for_each("lora_request", lora_request, len(prompts))
        processed = []
        for index, prompt in enumerate(prompts):
            try:
                one = self.llm_engine.process_input(
                    self._calls.next_id(),
                    prompt,
                    _final_only(all_params[index]),
                    priority=priorities[index],
                    tokenization_kwargs=tokenization_kwargs,
                    lora_request=adapters[index],
                )
            except ValidationError as error:
                if all_params is not sampling_params and error.parameter not in OF_A_PROMPT:
                    raise  # it is about what all prompts share
                raise located(error, "prompts", index, len(prompts)) from error
            processed.append(one)
        return processed

    def _pool(
        self,
        prompts: Sequence[PromptType | TextPair],
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: PoolingTask | None,
        use_tqdm: bool | Callable[..., tqdm],
        tokenization_kwargs: Mapping[str, Any] | None,
        lora_request: OneOrEachAdapter,
    ) -> list[PoolingRequestOutput[PoolingOutput | None]]:
        """Pool all prompts; if one is refused, none is queued."""
        processed = self.llm_engine.pooling_input.process_all(
            self._calls.next_id,
            prompts,
            params,
            task=task,
            options=TextOptions.of(tokenization_kwargs),
            lora_request=lora_request,
        )
        return self._calls.wait(self._calls.queue(processed), use_tqdm)


def _final_only(params: Any) -> Any:
    """The parameters for one output at the end. The input processor refuses objects of other
    types."""
    if not isinstance(params, SamplingParams):
        return params
    return params.clone(output_kind=RequestOutputKind.FINAL_ONLY)
