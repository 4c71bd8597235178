"""AsyncLLMEngine: requests and outputs on an event loop, the engine in a process of its own.

Each request has a collector, which merges outputs until the consumer takes them. So a slow consumer
delays no other, and needs no more memory than its answer.
"""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.ending import patience_s
from jaxllm.engine import commands
from jaxllm.engine.commands import Answer, Command
from jaxllm.errors import EngineDeadError, ValidationError, refused
from jaxllm.frontend.async_client import AnyEngine, connect
from jaxllm.frontend.client import load_engine_tokenizer
from jaxllm.frontend.engine_process import EngineProcess
from jaxllm.frontend.input_processor import InputProcessor, ProcessedInput, tokenization_options
from jaxllm.frontend.output_collector import OutputCollector
from jaxllm.frontend.output_processor import OutputProcessor
from jaxllm.frontend.pooling_input import PoolingInput, encoding
from jaxllm.frontend.pooling_length import TextPair
from jaxllm.frontend.tokenizer import Tokenizer
from jaxllm.frontend.tokenizer_threads import Result, TokenizerThreads, takes_long
from jaxllm.logging import init_logger
from jaxllm.lora.request import LoRARequest
from jaxllm.messages import Abort, Add, EngineInfo, EngineOutput, Outputs, Stop
from jaxllm.metrics.finished_request import FinishedRequest
from jaxllm.metrics.memory import EngineMemory
from jaxllm.metrics.stats import EngineStats
from jaxllm.metrics.tracing import start_tracing
from jaxllm.outputs import AnyOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from jaxllm.parsers.reasoning.base import Reasoning
from jaxllm.pooling_params import PoolingParams
from jaxllm.prompts import PromptType, size_of
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

logger = init_logger(__name__)

# How many outputs are processed before other tasks get a turn on the event loop.
_OUTPUTS_AT_ONCE = 128


class AsyncLLMEngine:
    """An engine for applications with an event loop. All coroutines must run on one loop."""

    def __init__(self, config: EngineConfig, process: AnyEngine | None = None):
        """Start the engine, or use a started one. Return when it is ready, which may take
        minutes."""
        begun = time.time()
        self.config = config
        # First, since what tracing needs may not be installed.
        self.tracer = start_tracing(config)
        self._process = EngineProcess(config) if process is None else process
        try:
            # The engine's process loads the model while this one loads the tokenizer.
            self.tokenizer: Tokenizer | None = load_engine_tokenizer(config)
            self._client = connect(self._process)
        except BaseException:
            self._stop_process(grace_s=0)
            raise
        self._input_processor = InputProcessor(config, self.info, self.tokenizer)
        self.adapters = self._input_processor.adapters  # those that have been checked
        self.images = self._input_processor.images
        self.pooling_input = PoolingInput(config, self.info, self.tokenizer, self.adapters)
        self._output_processor = OutputProcessor(
            self.tokenizer, self.info.pooling, on_end=self._tell_end
        )
        self._collectors: dict[str, OutputCollector] = {}
        self._tokenizer_threads = TokenizerThreads()
        self._reader: asyncio.Task[None] | None = None
        self._dead: BaseException | None = None
        self._is_shut_down = False
        self._idle = asyncio.Event()
        self._idle.set()
        # Called with every output, before its consumer gets it, and with every finished request.
        self.on_output: list[Callable[[AnyOutput], None]] = []
        self.on_end: list[Callable[[FinishedRequest], None]] = []
        if self.tracer is not None:
            if isinstance(self._process, EngineProcess):  # once for each engine
                self.tracer.trace_startup(self._client.startup, begun, time.time())
            self.on_end.append(self.tracer.trace_request)

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "AsyncLLMEngine":
        return cls(engine_args)

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokens that end an answer unless a request has ignore_eos."""
        return self._input_processor.eos_token_ids

    @property
    def exit_status(self) -> int | None:
        """The exit status of the engine's process; None while it runs."""
        return self._process.status

    @property
    def is_running(self) -> bool:
        return self._dead is None

    @property
    def errored(self) -> bool:
        return self._dead is not None

    @property
    def num_unfinished(self) -> int:
        return len(self._collectors)

    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a prompt, with an output whenever there is news. To close the generator, or to
        cancel the task that reads it, aborts the request."""
        process = functools.partial(
            self.process_input,
            request_id,
            prompt,
            sampling_params,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            lora_request=lora_request,
        )
        has_form = takes_long(prompt, sampling_params)
        return self._answer(
            request_id,
            lambda: self.in_tokenizer_thread(process, size_of(prompt), has_form=has_form),
        )

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
        """Validate and tokenise; raise ValidationError. Nothing is queued yet. Any thread may call
        this. It may take long, so do not call it on the event loop."""
        return self._input_processor.process(
            request_id,
            prompt,
            params,
            priority=priority,
            arrival_time=arrival_time,
            trace_headers=trace_headers,
            reasoning=reasoning,
            lora_request=lora_request,
            **tokenization_options(tokenization_kwargs),
        )

    def encode(
        self,
        prompt: PromptType | TextPair,
        pooling_params: PoolingParams,
        request_id: str,
        **how: Any,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput | None], None]:
        """Pool a prompt, with one output at the end. The options are those of `generate`."""
        process = encoding(self.pooling_input, prompt, pooling_params, request_id, **how)
        return self._answer(request_id, lambda: self.in_tokenizer_thread(process, size_of(prompt)))

    def submit(self, processed: ProcessedInput) -> AsyncGenerator[Any, None]:
        """Answer a request that `process_input` or `pooling_input` made, as `generate` does."""

        async def given() -> ProcessedInput:
            return processed

        return self._answer(processed.request_id, given)

    async def abort(self, request_id: str | list[str]) -> None:
        """End requests. Their consumers get a last output with finish_reason 'abort'."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            if one in self._collectors:
                self._collectors[one].is_aborted = True
            self._end(one)

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine is dead."""
        self._check()

    async def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer."""
        if self.tokenizer is None:
            raise ValidationError("there is no tokenizer: skip_tokenizer_init=True")
        return self.tokenizer.hf

    async def in_tokenizer_thread(
        self, function: Callable[[], Result], size: int, *, has_form: bool = False
    ) -> Result:
        """Run a function that uses the tokenizer or reads text, off the event loop. Texts of a
        large `size`, in characters or tokens, have their own thread and do not delay short ones.
        So have requests with a form of the answer."""
        return await self._tokenizer_threads.run(function, size, has_form=has_form)

    async def call(self, command: Command[Any, Answer]) -> Answer:
        """Have the engine run a command between two steps."""
        self._check()
        self._start_reading()
        return await self._client.call(command)

    async def stats(self) -> EngineStats:
        """The engine's figures as of now; those of several replicas are summed."""
        return EngineStats.total(await self.replica_stats())

    async def replica_stats(self) -> list[EngineStats]:
        """The figures of each replica as of now."""
        return await self.call(commands.GetStats())

    async def memory(self) -> EngineMemory:
        """The memory use of the engine's process and its devices as of now."""
        return await self.call(commands.GetMemory())

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prompt blocks. Return False and change nothing if some are in use."""
        return await self.call(commands.ResetPrefixCache())

    async def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Free memory until `wake_up`. Level 1 moves the weights to the host's memory and drops the
        KV cache, level 2 drops the weights too, and level 0 only pauses. Unfinished requests wait
        (mode 'keep') or end ('abort'). New requests wait."""
        await self.call(commands.Sleep(level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back and go on. Tags name the parts: 'weights', 'kv_cache', 'scheduling'."""
        await self.call(commands.WakeUp(tags))

    async def is_sleeping(self) -> bool:
        """Whether a part of the engine sleeps, so that it computes nothing."""
        return await self.call(commands.IsSleeping())

    async def start_profile(self) -> None:
        """Begin a profile, for TensorBoard or xprof, in the directory `profile_dir`."""
        await self.call(commands.StartProfile())

    async def stop_profile(self) -> None:
        """End the profile and write it out."""
        await self.call(commands.StopProfile())

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check an adapter, and let the engine read it before a request needs it."""
        check = functools.partial(self.adapters.check, lora_request)
        await self.call(commands.AddLora(await self.in_tokenizer_thread(check, 0, has_form=True)))
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget the adapters of this number, unless requests use them."""
        return await self.call(commands.RemoveLora(lora_id))

    async def list_loras(self) -> set[int]:
        """The numbers of the adapters in the host's memory."""
        return set(await self.call(commands.ListLoras()))

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in the host's memory. Return whether it is there."""
        return await self.call(commands.PinLora(lora_id))

    async def drain(self, timeout: float | None = None) -> bool:
        """Wait until every request has ended; return False if some have not within `timeout`."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
            return True
        except TimeoutError:
            return False

    def shutdown(self) -> None:
        """End the engine, and its process if this object started it. Unfinished requests end with
        an error."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self._dead is None and isinstance(self._process, EngineProcess):
            self._client.send(Stop())
        self._die(EngineDeadError("the engine has been shut down; make a new one"))
        if self._reader is not None:
            self._reader.cancel()
        self._client.close()
        self._stop_process(patience_s(self.config))
        self._tokenizer_threads.shutdown()
        self.images.close()
        if self.tracer is not None:
            self.tracer.shutdown()

    def _stop_process(self, grace_s: float) -> None:
        if isinstance(self._process, EngineProcess):
            self._process.stop(grace_s)

    def _check(self) -> None:
        if self._dead is not None:
            raise self._dead

    async def _answer(
        self, request_id: str, process: Callable[[], Awaitable[ProcessedInput]]
    ) -> AsyncGenerator[Any, None]:
        self._check()
        self._start_reading()
        if request_id in self._collectors:
            raise refused("request_id", request_id, "an unfinished request has this id")
        self._idle.clear()
        collector = self._collectors[request_id] = OutputCollector()
        try:
            processed = await process()
            self._check()
            self._client.own(processed.requests)
            collector.aggregate = processed.output_kind is RequestOutputKind.DELTA
            self._output_processor.add_request(processed, on_finish=self._deliver)
            if collector.is_aborted:
                self._end(request_id)
            else:
                self._client.send(Add.of(processed.requests))
            finished = False
            while not finished:
                output = await collector.get()
                finished = output.finished
                yield output
        finally:
            # The consumer has stopped, so a last output goes to a collector that nobody reads.
            self._end(request_id)
            del self._collectors[request_id]
            if not self._collectors:
                self._idle.set()

    def _end(self, request_id: str) -> None:
        """End a request unless it has ended. Its consumer gets a last output."""
        engine_ids = self._output_processor.abort(request_id)
        if engine_ids and self._dead is None:
            self._client.send(Abort(engine_ids))

    def _start_reading(self) -> None:
        if self._reader is None:
            self._client.listen()
            self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        """Take in the engine's messages while it lives."""
        try:
            while True:
                message = await self._client.receive()
                if isinstance(message, Outputs):
                    await self._take(message.outputs)
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:
            logger.exception("the frontend has failed")
            self._die(EngineDeadError(f"the frontend has failed: {type(error).__name__}: {error}"))

    async def _take(self, outputs: list[EngineOutput]) -> None:
        for first in range(0, len(outputs), _OUTPUTS_AT_ONCE):
            if first:
                await asyncio.sleep(0)
            some = outputs[first : first + _OUTPUTS_AT_ONCE]
            processed = self._output_processor.process(some)
            for output in processed.request_outputs:
                if not output.finished:  # `on_finish` has delivered the last one
                    self._deliver(output)
            if processed.abort_ids:
                # A stop string ended them, which only the frontend sees.
                self._client.send(Abort(processed.abort_ids))

    def _deliver(self, output: AnyOutput) -> None:
        for tell in self.on_output:
            tell(output)
        collector = self._collectors.get(output.request_id)
        if collector is not None:
            collector.put(output)

    def _tell_end(self, request: FinishedRequest) -> None:
        for tell in self.on_end:
            tell(request)

    def _die(self, error: BaseException) -> None:
        """Note that the engine is dead: every waiting consumer and call gets the error."""
        if self._dead is None:
            self._dead = error
            for collector in self._collectors.values():
                collector.fail(error)
            self._client.fail_calls(error)
