"""LLMEngine: requests in, outputs out, one step at a time.

LLMEngine is for callers that drive the engine themselves; `LLM` is a loop around it. It joins the
three parts of the frontend: the input processor (validates, tokenises), the client (reaches the
engine core) and the output processor (ids to text, stop strings, RequestOutputs).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.engine.commands import (
    AddLora,
    Answer,
    Command,
    GetStats,
    IsSleeping,
    ListLoras,
    PinLora,
    RemoveLora,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    StopProfile,
    WakeUp,
)
from jaxllm.errors import ValidationError, refused
from jaxllm.frontend.client import EngineClient, load_engine_tokenizer, start_engine
from jaxllm.frontend.input_processor import (
    InputProcessor,
    ProcessedInput,
    tokenization_options,
)
from jaxllm.frontend.interrupts import InterruptsBetweenSteps
from jaxllm.frontend.output_processor import OutputProcessor
from jaxllm.frontend.pooling_input import PoolingInput
from jaxllm.frontend.pooling_length import TextOptions
from jaxllm.frontend.tokenizer import Tokenizer
from jaxllm.lora.request import LoRARequest
from jaxllm.messages import EngineInfo
from jaxllm.metrics.stats import EngineStats
from jaxllm.metrics.tracing import start_tracing
from jaxllm.outputs import AnyOutput
from jaxllm.parsers.reasoning.base import Reasoning
from jaxllm.pooling_params import PoolingParams
from jaxllm.prompts import PromptType
from jaxllm.sampling_params import SamplingParams


class LLMEngine:
    """An engine in this process. Not thread-safe: one thread adds requests and steps."""

    def __init__(self, config: EngineConfig):
        begun = time.time()
        self.config = config
        self._tracer = start_tracing(config)
        # The tokenizer first: a missing one is reported before gigabytes are read.
        self.tokenizer: Tokenizer | None = load_engine_tokenizer(config)
        self._engine: EngineClient = start_engine(config)
        self._input_processor = InputProcessor(config, self.info, self.tokenizer)
        self.adapters = self._input_processor.adapters  # those that have been checked
        self.pooling_input = PoolingInput(config, self.info, self.tokenizer, self.adapters)
        pooling = self.info.pooling
        if self._tracer is None:
            self._output_processor = OutputProcessor(self.tokenizer, pooling)
        else:
            self._tracer.trace_startup(self._engine.startup, begun, time.time())
            self._output_processor = OutputProcessor(
                self.tokenizer, pooling, on_end=self._tracer.trace_request
            )
        self._outputs: list[AnyOutput] = []  # of a step that Ctrl-C interrupted

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "LLMEngine":
        return cls(engine_args)

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokens that end an answer, the end of sequence proper first."""
        return self._input_processor.eos_token_ids

    def is_known(self, request_id: str) -> bool:
        """Whether an unfinished request has this id."""
        return self._output_processor.is_known(request_id)

    def process_input(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        reasoning: Reasoning | None = None,
        lora_request: LoRARequest | None = None,
    ) -> ProcessedInput:
        """Validate and tokenise; raise ValidationError. Nothing is queued yet."""
        if self.is_known(request_id):
            raise ValidationError(
                f"request_id={request_id!r} is already in use by an unfinished request",
                parameter="request_id",
                value=request_id,
            )
        return self._input_processor.process(
            request_id,
            prompt,
            params,
            priority=priority,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            trace_headers=trace_headers,
            reasoning=reasoning,
            lora_request=lora_request,
            **tokenization_options(tokenization_kwargs),
        )

    def submit(
        self,
        processed: ProcessedInput,
        *,
        on_finish: Callable[[Any], None] | None = None,
    ) -> None:
        """Queue a request that `process_input` or `pooling_input` made. `on_finish` is called with
        its last output, in the step that also returns this output, or when the request is aborted.
        """
        self._output_processor.add_request(processed, on_finish)
        try:
            for request in processed.requests:
                self._engine.add_request(request)
        except BaseException:
            self.abort_request(processed.request_id)
            raise

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a request, or raise ValidationError and queue nothing."""
        if isinstance(params, PoolingParams):
            processed = self.pooling_input.process(
                request_id,
                prompt,
                params,
                arrival_time=arrival_time,
                priority=priority,
                options=TextOptions.of(tokenization_kwargs),
                trace_headers=trace_headers,
                lora_request=lora_request,
            )
            self.submit(processed)
            return
        self.submit(
            self.process_input(
                request_id,
                prompt,
                params,
                arrival_time=arrival_time,
                priority=priority,
                tokenization_kwargs=tokenization_kwargs,
                trace_headers=trace_headers,
                lora_request=lora_request,
            )
        )

    def abort_request(self, request_ids: str | list[str]) -> None:
        """End requests; ignore unknown and finished ids. `step` returns no more outputs of them:
        only a request's `on_finish` gets its last output."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        for request_id in ids:
            self._engine.abort_requests(self._output_processor.abort(request_id))

    def step(self) -> list[AnyOutput]:
        """Run one step of the engine and return its outputs, if any. Raise ValidationError if the
        engine sleeps while all requests wait for it.

        KeyboardInterrupt is raised after the step; the next call returns the step's outputs.
        """
        waits = self._output_processor.has_unfinished() and not self._outputs
        if waits and not self._engine.has_work() and self.is_sleeping():
            raise ValidationError("the engine sleeps, and requests wait for it; call wake_up()")
        with InterruptsBetweenSteps():
            processed = self._output_processor.process(self._engine.step())
            self._outputs += processed.request_outputs
            if processed.abort_ids:
                # A stop string ended them, which only the frontend sees.
                self._engine.abort_requests(processed.abort_ids)
        outputs, self._outputs = self._outputs, []
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do or to return."""
        return (
            self._output_processor.has_unfinished()
            or bool(self._outputs)
            or self._engine.has_work()
        )

    def get_num_unfinished_requests(self) -> int:
        return self._output_processor.num_unfinished

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer."""
        if self.tokenizer is None:
            raise ValidationError("there is no tokenizer: skip_tokenizer_init=True")
        return self.tokenizer.hf

    def call(self, command: Command[Any, Answer]) -> Answer:
        """Have the engine run a command between two steps."""
        return self._engine.call(command)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prompt blocks. Return False and change nothing if some are in use."""
        for name, value in (
            ("reset_running_requests", reset_running_requests),
            ("reset_connector", reset_connector),
        ):
            if value:
                raise refused(name, value, "it is not supported yet; leave it at False")
        return self.call(ResetPrefixCache())

    def is_sleeping(self) -> bool:
        """Whether a part of the engine sleeps, so that it computes nothing."""
        return self.call(IsSleeping())

    def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Free memory until `wake_up`. Level 1 moves the weights to the host's memory and drops the
        KV cache, level 2 drops the weights too, and level 0 only pauses. Unfinished requests wait
        (mode 'keep') or end ('abort'). New requests wait."""
        self.call(Sleep(level, mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back and go on. Tags name the parts: 'weights', 'kv_cache', 'scheduling'."""
        self.call(WakeUp(tags))

    def start_profile(self) -> None:
        """Begin a profile, for TensorBoard or xprof, in the directory `profile_dir`."""
        self.call(StartProfile())

    def stop_profile(self) -> None:
        """End the profile and write it out."""
        self.call(StopProfile())

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check an adapter, and let the engine read it before a request needs it."""
        self.call(AddLora(self.adapters.check(lora_request)))
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget the adapters of this number, unless requests use them. Return whether there were
        any."""
        return self.call(RemoveLora(lora_id))

    def list_loras(self) -> set[int]:
        """The numbers of the adapters in the host's memory."""
        return set(self.call(ListLoras()))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in the host's memory. Return whether it is there."""
        return self.call(PinLora(lora_id))

    def stats(self) -> EngineStats:
        """The engine's figures as of now; those of several replicas are summed."""
        return EngineStats.total(self.replica_stats())

    def replica_stats(self) -> list[EngineStats]:
        """The figures of each replica as of now."""
        return self.call(GetStats())

    def shutdown(self) -> None:
        self._engine.shutdown()
        self._input_processor.images.close()
        if self._tracer is not None:
            self._tracer.shutdown()
