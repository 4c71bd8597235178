"""The state that all endpoints share: the engine, the served model, and the work under way."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

import msgspec

from jaxllm.frontend.async_llm_engine import AsyncLLMEngine
from jaxllm.openai.batches.store import BatchLimits, BatchStore
from jaxllm.openai.chat import ChatRequest
from jaxllm.openai.errors import NotFoundError, UnavailableError
from jaxllm.openai.responses.store import ResponseStore
from jaxllm.openai.served_model import ServedModel
from jaxllm.server.body import BodyLimits
from jaxllm.server.engine_metrics import EngineMetrics
from jaxllm.server.limits import Admission
from jaxllm.server.metrics import ServerMetrics
from jaxllm.server.options import ServerOptions
from jaxllm.server.peers import Peers
from jaxllm.server.templates import Templates

Result = TypeVar("Result")


class Service:
    """One engine behind a server."""

    def __init__(
        self,
        engine: AsyncLLMEngine,
        served: ServedModel,
        options: ServerOptions,
        peers: Peers | None = None,  # None: there are no other frontends
    ):
        self.engine = engine
        self.templates = Templates(options.chat_template_timeout)
        self.served = dataclasses.replace(served, renderer=self.templates)
        self.options = options
        self.body_limits = BodyLimits.of(
            options,
            engine.info.max_model_len,
            has_media=engine.info.images is not None or engine.info.embeds is not None,
        )
        self.peers = peers or Peers.none()
        store = options.response_store
        self.responses = (
            None if store is None else ResponseStore(store, options.response_store_bytes)
        )
        directory = options.batch_dir
        limits = BatchLimits(options.batch_dir_bytes, options.max_batches)
        self.batches = None if directory is None else BatchStore(directory, limits)
        self.started = int(time.time())
        # The ids of requests in the engine, and the names that clients know them by.
        self.under_way: dict[str, tuple[str, ...]] = {}
        self.background: set[asyncio.Task[None]] = set()  # answers for which no client waits
        self.is_stopping = False
        running = engine.info.max_num_seqs * engine.config.parallel.data_parallel_size
        queued = options.max_queued_requests
        self.admission = Admission(
            None if queued is None else running + queued,
            options.max_queued_tokens,
            options.max_queued_bytes,
            self.peers,
        )
        prefix, model = options.metrics_prefix, served.names[0]
        self.engine_metrics = EngineMetrics(engine, prefix, model)
        self.metrics = ServerMetrics(
            prefix,
            model,
            num_replicas=engine.config.parallel.data_parallel_size,
            refused=self.admission.num_refused,
        )
        self.peers.report = self.metrics.report
        self.peers.on_told = self._on_told
        if engine.tracer is not None:
            engine.tracer.model = model

    @property
    def is_ready(self) -> bool:
        return self.engine.is_running and not self.is_stopping

    async def check_takes_requests(self) -> None:
        """Raise if the server cannot answer requests any more."""
        await self.engine.check_health()
        if self.is_stopping:
            raise UnavailableError("the server is stopping")

    async def with_adapter(self, answer: Callable[[], Awaitable[Result]]) -> Result:
        """Answer; if the request names an adapter that is not known, ask the user's resolver for
        it, and answer then."""
        try:
            return await answer()
        except NotFoundError as error:
            if error.parameter != "model":
                raise
            name, timeout = str(error.value), self.options.request_timeout
            if not await self.served.adapters.ask(name, timeout):
                raise
        return await answer()

    async def in_text_thread(
        self, request: object, work: Callable[[], Result], body_size: int
    ) -> Result:
        """Run work on the text of a request or of a decoded body, in a thread where it delays only
        requests of its kind."""
        if isinstance(request, ChatRequest):
            return await self.templates.run(
                request.chat_template, request.chat_template_kwargs, work, body_size
            )
        if isinstance(request, dict) and "messages" in request:
            return await self.templates.run(
                request.get("chat_template"), request.get("chat_template_kwargs"), work, body_size
            )
        return await self.engine.in_tokenizer_thread(work, body_size)

    async def close(self, *tasks: asyncio.Task[None]) -> None:
        """End what goes on in the background, with these tasks."""
        self.templates.close()
        tasks = (*tasks, *self.background, *self.served.adapters.under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def abort_all(self) -> None:
        """Abort all requests under way; their clients get an error."""
        await self.engine.abort(list(self.under_way))

    async def abort(self, names: Collection[str] | None) -> int:
        """Abort the requests of these names, or all, at every frontend; return how many answers
        there were. Their clients get an error."""
        try:
            found = await self.peers.tell(msgspec.json.encode(names))
        except OSError:
            raise UnavailableError("a frontend does not answer; try again") from None
        return await self.abort_here(names) + sum(map(int, found))

    async def abort_here(self, names: Collection[str] | None) -> int:
        """Abort those of this frontend."""
        wanted = None if names is None else frozenset(names)
        found = [
            one
            for one, known_as in self.under_way.items()
            if wanted is None or not wanted.isdisjoint(known_as)
        ]
        await self.engine.abort(found)
        return len(found)

    async def _on_told(self, message: bytes) -> bytes:
        names = msgspec.json.decode(message, type=list[str] | None)
        return str(await self.abort_here(names)).encode()
