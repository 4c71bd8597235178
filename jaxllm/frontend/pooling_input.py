"""Validates pooling requests: a text, token ids or a pair of texts becomes one engine request."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError, refused
from jaxllm.frontend.input_processor import ProcessedInput
from jaxllm.frontend.many_prompts import for_each, located
from jaxllm.frontend.pooling_length import PoolingLength, TextOptions, TextPair
from jaxllm.frontend.prompt_reader import PromptReader
from jaxllm.frontend.tokenizer import Tokenizer
from jaxllm.lora.catalog import AdapterCatalog
from jaxllm.lora.request import LoRARequest
from jaxllm.messages import EngineInfo, EngineRequest
from jaxllm.pooler_config import Pooling
from jaxllm.pooling_params import PoolingParams, PoolingTask, check_task
from jaxllm.prompts import PromptType
from jaxllm.sampling_params import SamplingParams, check_is_text

# To the engine a pooling request is one of a single token, which stands for the end of the prompt.
_NOTHING_SAMPLED = SamplingParams(temperature=0.0, max_tokens=1)


class PoolingInput:
    """Validates and tokenises for one engine that pools."""

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        adapters: AdapterCatalog,
    ):
        self._info = info
        self._adapters = adapters
        self._tokenizer = tokenizer
        self._reader = PromptReader(config, info, tokenizer)

    @property
    def pooling(self) -> Pooling:
        """How the engine pools; raise ValidationError if it generates."""
        if self._info.pooling is None:
            raise ValidationError(
                "the engine generates (runner='generate'), and does not pool; start one with "
                "runner='pooling' for embeddings, scores and classes",
                parameter="runner",
            )
        return self._info.pooling

    def check_params(
        self, params: PoolingParams | None, task: PoolingTask | None = None
    ) -> PoolingParams:
        """Return the parameters with all fields resolved; raise ValidationError. `task` is what the
        call or the path stands for."""
        pooling = self.pooling
        if params is None:
            params = PoolingParams()
        if not isinstance(params, PoolingParams):
            raise refused("pooling_params", params, "it must be a PoolingParams")
        if task is not None:
            check_task("task", task)
            if params.task not in (None, task):
                raise refused("task", params.task, f"this asks for {task!r}; leave it out")
        task = task or params.task or pooling.default_task
        if task not in pooling.tasks:
            convert = "classify" if "classify" in task else "embed"
            raise refused(
                "task",
                task,
                f"the engine runs the model for {' and '.join(pooling.tasks)}; start one with "
                f"convert={convert!r}, if the model has what that needs",
            )
        dimensions = params.dimensions
        if dimensions is not None:
            pooling.check_dimensions(dimensions)
        elif pooling.is_embedding:
            dimensions = pooling.dimensions
        self._check_step(params, task)
        use = params.use_activation
        return params.clone(
            task=task,
            dimensions=dimensions,
            use_activation=pooling.use_activation if use is None else use,
        )

    def _check_step(self, params: PoolingParams, task: PoolingTask) -> None:
        """Refuse what is of steps where there are none."""
        pooling = self.pooling
        tag, wanted = params.step_tag_id, params.returned_token_ids
        for name, value in (("step_tag_id", tag), ("returned_token_ids", wanted)):
            if value is not None and pooling.tok_pooling != "STEP":
                why = "start the engine with pooler_config={'pooling_type': 'STEP'}"
                raise refused(name, value, why)
            if value is not None and task != pooling.tasks[1]:
                raise refused(name, value, f"{task!r} has one vector for a whole prompt; leave it")
        if tag is not None:
            self._reader.check_in_vocabulary("step_tag_id", [tag])
        if wanted is not None:
            pooling.columns(wanted)  # refuses

    def process(
        self,
        request_id: str,
        prompt: PromptType | TextPair,
        params: PoolingParams | None,
        *,
        task: PoolingTask | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        options: TextOptions | None = None,
        trace_headers: Mapping[str, str] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> ProcessedInput:
        """Turn a prompt into one engine request; raise ValidationError."""
        params = self.check_params(params, task)
        adapter = None if lora_request is None else self._adapters.check(lora_request)
        priority, arrival_time = self._reader.check_request(
            request_id, priority, arrival_time, trace_headers
        )
        info = self._info
        length = PoolingLength(
            self.pooling, info.max_model_len, info.vocab_size, options or TextOptions()
        )
        if isinstance(prompt, TextPair):
            text, salt, token_ids = None, None, self._read_pair(prompt, length)
        else:
            text, token_ids, salt = self._reader.read(prompt, length, may_be_empty=False)
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=_NOTHING_SAMPLED,
            max_tokens=1,
            seed=0,
            priority=priority,
            arrival_time=arrival_time,
            cache_salt=salt,
            adapter=adapter,
            pooling_task=params.task,
        )
        shown = [token % info.vocab_size for token in token_ids]  # without types
        return ProcessedInput(request_id, text, shown, params, [request], trace_headers)

    def process_all(
        self,
        next_id: Callable[[], str],
        prompts: Sequence[PromptType | TextPair],
        params: PoolingParams | Sequence[PoolingParams] | None,
        *,
        task: PoolingTask | None,
        options: TextOptions,
        lora_request: LoRARequest | None | Sequence[LoRARequest | None],
    ) -> list[ProcessedInput]:
        """Turn prompts into requests, with parameters and an adapter for all, or one for each."""
        all_params = for_each("pooling_params", params, len(prompts))
        adapters = for_each("lora_request", lora_request, len(prompts))
        processed = []
        for index, prompt in enumerate(prompts):
            try:
                one = self.process(
                    next_id(),
                    prompt,
                    all_params[index],
                    task=task,
                    options=options,
                    lora_request=adapters[index],
                )
            except ValidationError as error:
                raise located(error, "prompts", index, len(prompts)) from error
            processed.append(one)
        return processed

    def _read_pair(self, pair: TextPair, length: PoolingLength) -> list[int]:
        if self._tokenizer is None:
            raise ValidationError(
                "there is no tokenizer (skip_tokenizer_init=True) to join two texts with; pass "
                "prompt_token_ids",
                parameter="prompt",
            )
        for text in (pair.first, pair.second):
            if not isinstance(text, str):
                raise refused("prompt", text, "each of a pair must be a string")
            check_is_text("prompt", text)
        return length.encode_pair(self._tokenizer, pair)


def encoding(
    inputs: PoolingInput,
    prompt: PromptType | TextPair,
    params: PoolingParams,
    request_id: str,
    *,
    priority: int = 0,
    tokenization_kwargs: Mapping[str, Any] | None = None,
    trace_headers: Mapping[str, str] | None = None,
    lora_request: LoRARequest | None = None,
) -> Callable[[], ProcessedInput]:
    """What makes the request of a call of `encode`, off the event loop."""
    return functools.partial(
        inputs.process,
        request_id,
        prompt,
        params,
        arrival_time=time.time(),
        priority=priority,
        options=TextOptions.of(tokenization_kwargs),
        trace_headers=trace_headers,
        lora_request=lora_request,
    )
