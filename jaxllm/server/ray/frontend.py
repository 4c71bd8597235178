"""The server of a fleet, as the ingress of its application: HTTP, text, and nothing else."""

import asyncio
import contextlib
import dataclasses
import secrets
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.config import EngineConfig
from jaxllm.errors import EngineDeadError
from jaxllm.files import read_given_text
from jaxllm.frontend.async_llm_engine import AsyncLLMEngine
from jaxllm.frontend.far_engine import FarEngine
from jaxllm.logging import init_logger
from jaxllm.messages import Ready
from jaxllm.server.app import make_app
from jaxllm.server.auth import read_keys
from jaxllm.server.ray.options import Asked, read
from jaxllm.server.run import make_service
from jaxllm.server.service import Service
from jaxllm.server.stats_log import log_stats

logger = init_logger(__name__)

_WITHOUT_REPLICAS_S = 10.0
# Two threads that import parts of transformers at once may both fail.
_ONE_AT_A_TIME = threading.Lock()


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
        asked = self._asked
        service = await service_of(self._engines, asked, asked.fleet.num_frontends > 1)
        self._engine = service.engine
        return within_prefix(make_app(service, read_keys(asked.server), _lifespan_of(service)))


async def service_of(engines: Any, asked: Asked, has_own_seed: bool) -> Service:
    """Wait for a replica, and make what the endpoints of its model share."""
    from jaxllm.server.ray.fleet import Fleet

    ready = msgspec.msgpack.decode(await engines.describe.remote(), type=Ready)
    fleet = Fleet(engines, ready, asked.fleet.max_attempts)
    config = _own_seed(asked.config) if has_own_seed else asked.config
    # In a thread, since it reads the tokenizer.
    engine = await asyncio.to_thread(_make_engine, config, fleet)
    template = asked.server.chat_template and read_given_text(asked.server.chat_template)
    return make_service(engine, asked.server, template)


def _make_engine(config: EngineConfig, fleet: FarEngine) -> AsyncLLMEngine:
    with _ONE_AT_A_TIME:
        return AsyncLLMEngine(config, fleet)


def _lifespan_of(service: Service) -> Any:
    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = []
        if not service.options.disable_log_stats:
            tasks.append(asyncio.create_task(log_stats_of(service)))
        yield
        # Serve has waited until no requests are under way, for as long as it may.
        service.is_stopping = True
        await service.close(*tasks)
        service.engine.shutdown()

    return lifespan


async def log_stats_of(service: Service, model: str | None = None) -> None:
    """Log as the server of one engine does, and go on when there are replicas again."""
    while service.engine.is_running:
        try:
            await log_stats(service.engine, model=model)
        except EngineDeadError as error:
            logger.warning("there are no figures: %s", error)
            await asyncio.sleep(_WITHOUT_REPLICAS_S)


def _own_seed(config: EngineConfig) -> EngineConfig:
    """The config with another default seed. With the same one, every frontend would give the same
    answer to a question without a seed."""
    seed = config.model.seed + secrets.randbits(31)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, seed=seed))


def within_prefix(app: ASGIApp) -> ASGIApp:
    """An application that knows nothing of the prefix at which Serve offers it."""

    async def stripped(scope: Scope, receive: Receive, send: Send) -> None:
        prefix = scope.get("root_path", "")
        if prefix and scope["type"] == "http" and scope["path"].startswith(prefix):
            scope = dict(scope) | {"path": scope["path"][len(prefix) :] or "/", "root_path": ""}
        await app(scope, receive, send)

    return stripped
