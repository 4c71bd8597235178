"""The server of a fleet, as the ingress of its application: HTTP, text, and nothing else."""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.config import EngineConfig
from jaxllm.errors import EngineDeadError
from jaxllm.files import read_given_text
from jaxllm.frontend.async_llm_engine import AsyncLLMEngine
from jaxllm.logging import init_logger
from jaxllm.messages import Ready
from jaxllm.server.app import make_app
from jaxllm.server.auth import read_keys
from jaxllm.server.ray.options import read
from jaxllm.server.run import make_service
from jaxllm.server.service import Service
from jaxllm.server.stats_log import log_stats

logger = init_logger(__name__)

_WITHOUT_REPLICAS_S = 10.0


class Frontend:
    """Waits for the first replica, which says what it serves, and then makes the application."""

    def __init__(self, engines: Any, options: Mapping[str, Any]):
        """`engines` is the handle of the replicas' deployment."""
        self._engines = engines
        self._asked = read(options)
        self._engine: AsyncLLMEngine | None = None

    async def check_health(self) -> None:
        """Raise if no request would get an answer any more, so that Serve replaces the frontend."""
        if self._engine is not None:
            await self._engine.check_health()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        from jaxllm.server.ray.fleet import Fleet

        asked = self._asked
        ready = msgspec.msgpack.decode(await self._engines.describe.remote(), type=Ready)
        fleet = Fleet(self._engines, ready, asked.fleet.max_attempts)
        config = asked.config if asked.fleet.num_frontends == 1 else _own_seed(asked.config)
        # In a thread, since it reads the tokenizer.
        engine = self._engine = await asyncio.to_thread(AsyncLLMEngine, config, fleet)
        template = asked.server.chat_template and read_given_text(asked.server.chat_template)
        service = make_service(engine, asked.server, template)
        return _within_prefix(make_app(service, read_keys(asked.server), _lifespan_of(service)))


def _lifespan_of(service: Service) -> Any:
    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = []
        if not service.options.disable_log_stats:
            tasks.append(asyncio.create_task(_log_stats(service.engine)))
        yield
        # Serve has waited until no requests are under way, for as long as it may.
        service.is_stopping = True
        await service.close(*tasks)
        service.engine.shutdown()

    return lifespan


async def _log_stats(engine: AsyncLLMEngine) -> None:
    """Log as the server of one engine does, and go on when there are replicas again."""
    while engine.is_running:
        try:
            await log_stats(engine)
        except EngineDeadError as error:
            logger.warning("there are no figures: %s", error)
            await asyncio.sleep(_WITHOUT_REPLICAS_S)


def _own_seed(config: EngineConfig) -> EngineConfig:
    """The config with another default seed. With the same one, every frontend would give the same
    answer to a question without a seed."""
    seed = config.model.seed + secrets.randbits(31)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, seed=seed))


def _within_prefix(app: ASGIApp) -> ASGIApp:
    """An application that knows nothing of the prefix at which Serve offers it."""

    async def stripped(scope: Scope, receive: Receive, send: Send) -> None:
        prefix = scope.get("root_path", "")
        if prefix and scope["type"] == "http" and scope["path"].startswith(prefix):
            scope = dict(scope) | {"path": scope["path"][len(prefix) :] or "/", "root_path": ""}
        await app(scope, receive, send)

    return stripped
