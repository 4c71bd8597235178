"""AsyncLLMEngine: requests and outputs on an event loop, the engine in a process of its own.

Each request has a collector, where outputs merge until they are asked for: a slow consumer holds up
nobody and needs no more memory than its answer.
"""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.engine.commands import (
    Answer,
    Command,
    GetMemory,
    GetStats,
    IsSleeping,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    StopProfile,
    WakeUp,
)
from jaxllm.errors import EngineDeadError, ValidationError, refused
from jaxllm.frontend.async_client import AsyncClient
from jaxllm.frontend.client import load_engine_tokenizer
from jaxllm.frontend.engine_process import EngineProcess, JoinedEngine
from jaxllm.frontend.input_processor import InputProcessor, ProcessedInput, tokenization_options
from jaxllm.frontend.output_collector import OutputCollector
from jaxllm.frontend.output_processor import OutputProcessor
from jaxllm.frontend.tokenizer import Tokenizer
from jaxllm.frontend.tokenizer_threads import Result, TokenizerThreads
from jaxllm.logging import init_logger
from jaxllm.messages import (
    Abort,
    Add,
    EngineInfo,
    EngineOutput,
    Outputs,
    Stop,
)
from jaxllm.metrics.finished_request import FinishedRequest
from jaxllm.metrics.memory import EngineMemory
from jaxllm.metrics.stats import EngineStats
from jaxllm.metrics.tracing import start_tracing
from jaxllm.outputs import RequestOutput
from jaxllm.prompts import PromptType
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

logger = init_logger(__name__)

# So many outputs are worked through before others get their turn on the event loop.
_OUTPUTS_AT_ONCE = 128
_STOP_GRACE_S = 10.0


class AsyncLLMEngine:
    """An engine for applications with an event loop. All methods are for one loop."""

    def __init__(self, config: EngineConfig, process: EngineProcess | JoinedEngine | None = None):
        """Start the engine, or use one that was started; returns when it is ready, which may take
        minutes."""
        begun = time.time()
        self.config = config
        # First of all: what it needs may not be installed.
        self.tracer = start_tracing(config)
        self._process = EngineProcess(config) if process is None else process
        try:
            # Both load at once.
            self.tokenizer: Tokenizer | None = load_engine_tokenizer(config)
            self._client = AsyncClient(self._process)
        except BaseException:
            self._stop_process(grace_s=0)
            raise
        self._input_processor = InputProcessor(config, self.info, self.tokenizer)
        self._output_processor = OutputProcessor(self.tokenizer, on_end=self._tell_end)
        self._collectors: dict[str, OutputCollector] = {}
        self._tokenizer_threads = TokenizerThreads()
        self._reader: asyncio.Task[None] | None = None
        self._dead: BaseException | None = None
        self._is_shut_down = False
        self._idle = asyncio.Event()
        self._idle.set()
        # Who sees every output, before its consumer does, and every end of a request.
        self.on_output: list[Callable[[RequestOutput], None]] = []
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
    def exit_status(self) -> int | None:
        """Of the engine's process; None while it runs."""
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
        lora_request: None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a prompt, with an output whenever there is news. Whoever stops asking, or is
        cancelled, has aborted the request."""
        if lora_request is not None:
            raise refused("lora_request", lora_request, "LoRA is not supported yet; give None")
        process = functools.partial(
            self.process_input,
            request_id,
            prompt,
            sampling_params,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
        )
        return self._answer(request_id, lambda: self.in_tokenizer_thread(process, _size_of(prompt)))

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
    ) -> ProcessedInput:
        """Validate and tokenise; raises ValidationError. Nothing is queued yet. From any thread:
        that of the event loop has better things to do."""
        return self._input_processor.process(
            request_id,
            prompt,
            params,
            priority=priority,
            arrival_time=arrival_time,
            trace_headers=trace_headers,
            **tokenization_options(tokenization_kwargs),
        )

    def submit(self, processed: ProcessedInput) -> AsyncGenerator[RequestOutput, None]:
        """Answer what `process_input` made, as `generate` does."""

        async def given() -> ProcessedInput:
            return processed

        return self._answer(processed.request_id, given)

    async def abort(self, request_id: str | list[str]) -> None:
        """End requests: whoever waits for them gets a last output with finish_reason 'abort'."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            if one in self._collectors:
                self._collectors[one].is_aborted = True
            self._end(one)

    async def check_health(self) -> None:
        """Raises EngineDeadError if there is no engine any more."""
        self._check()

    async def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer."""
        if self.tokenizer is None:
            raise ValidationError("there is no tokenizer: skip_tokenizer_init=True")
        return self.tokenizer.hf

    async def in_tokenizer_thread(self, function: Callable[[], Result], size: int) -> Result:
        """Run what uses the tokenizer, or reads text of about so many characters or tokens, where
        it holds up nobody but others who do, and none of these if it is long and they are not."""
        return await self._tokenizer_threads.run(function, size)

    async def call(self, command: Command[Any, Answer]) -> Answer:
        """Have the engine do what a command says, between two steps."""
        self._check()
        self._start_reading()
        return await self._client.call(command)

    async def stats(self) -> EngineStats:
        """The engine's figures as of now; of several replicas, as of one."""
        return EngineStats.total(await self.replica_stats())

    async def replica_stats(self) -> list[EngineStats]:
        """The figures of each replica as of now."""
        return await self.call(GetStats())

    async def memory(self) -> EngineMemory:
        """What the engine's process and its devices have in memory, as of now."""
        return await self.call(GetMemory())

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prompt blocks; False, and nothing happens, when some are in use."""
        return await self.call(ResetPrefixCache())

    async def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Give memory back until `wake_up`: at level 1 the weights go to the host's memory and the
        KV cache is dropped, at level 2 the weights are dropped, too; level 0 only pauses. Requests
        that are under way wait (mode 'keep') or end ('abort'); new ones wait."""
        await self.call(Sleep(level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back and go on. With tags, only of 'weights', 'kv_cache' or 'scheduling'."""
        await self.call(WakeUp(tags))

    async def is_sleeping(self) -> bool:
        """Whether a part of the engine sleeps, so that it computes nothing."""
        return await self.call(IsSleeping())

    async def start_profile(self) -> None:
        """Begin a profile of the engine, for TensorBoard or xprof, in the directory
        `profile_dir`."""
        await self.call(StartProfile())

    async def stop_profile(self) -> None:
        """End the profile and write it out."""
        await self.call(StopProfile())

    async def drain(self, timeout: float | None = None) -> bool:
        """Wait until no request is under way; False if some still are after this time."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
            return True
        except TimeoutError:
            return False

    def shutdown(self) -> None:
        """End the engine and its process, if it is ours; requests under way end with it."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self._dead is None and isinstance(self._process, EngineProcess):
            self._client.send(Stop())
        self._die(EngineDeadError("the engine has been shut down; make a new one"))
        if self._reader is not None:
            self._reader.cancel()
        self._client.close()
        self._stop_process(_STOP_GRACE_S)
        self._tokenizer_threads.shutdown()
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
    ) -> AsyncGenerator[RequestOutput, None]:
        self._check()
        self._start_reading()
        collector = self._reserve(request_id)
        try:
            processed = await process()
            self._check()
            self._client.own(processed.requests)
            collector.aggregate = processed.params.output_kind is RequestOutputKind.DELTA
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
            # Before the collector goes: who has stopped asking wants no last output.
            self._end(request_id)
            del self._collectors[request_id]
            if not self._collectors:
                self._idle.set()

    def _reserve(self, request_id: str) -> OutputCollector:
        if request_id in self._collectors:
            raise refused("request_id", request_id, "an unfinished request has this id")
        self._idle.clear()
        collector = self._collectors[request_id] = OutputCollector()
        return collector

    def _end(self, request_id: str) -> None:
        """End a request, if it has not ended; its last output goes to whoever waits."""
        engine_ids = self._output_processor.abort(request_id)
        if engine_ids and self._dead is None:
            self._client.send(Abort(engine_ids))

    def _start_reading(self) -> None:
        if self._reader is None:
            self._client.listen()
            self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        """Take in what the engine sends, for as long as it lives."""
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
                if not output.finished:  # a last one has been delivered
                    self._deliver(output)
            if processed.abort_ids:
                # Ended by a stop string, which only the frontend can see.
                self._client.send(Abort(processed.abort_ids))

    def _deliver(self, output: RequestOutput) -> None:
        for tell in self.on_output:
            tell(output)
        collector = self._collectors.get(output.request_id)
        if collector is not None:
            collector.put(output)

    def _tell_end(self, request: FinishedRequest) -> None:
        for tell in self.on_end:
            tell(request)

    def _die(self, error: BaseException) -> None:
        """There is no engine any more: everybody who waits hears of it."""
        if self._dead is None:
            self._dead = error
            for collector in self._collectors.values():
                collector.fail(error)
            self._client.fail_calls(error)


def _size_of(prompt: object) -> int:
    """About how much there is to read of what may be a prompt of any kind."""
    given = prompt
    if isinstance(prompt, Mapping):
        given = prompt.get("prompt_token_ids") or prompt.get("prompt")
    return len(given) if isinstance(given, str | list | tuple) else 0
