"""Status of the server: health, version, models, load and metrics."""

from starlette.requests import Request
from starlette.responses import Response

import jaxllm
from jaxllm.openai.errors import UnavailableError
from jaxllm.openai.models import ModelCard, ModelList
from jaxllm.server.errors import json_response
from jaxllm.server.service import Service


async def health(service: Service, request: Request) -> Response:
    return Response(status_code=200 if service.engine.is_running else 503)


async def ready(service: Service, request: Request) -> Response:
    return Response(status_code=200 if service.is_ready else 503)


async def version(service: Service, request: Request) -> Response:
    return json_response({"version": jaxllm.__version__})


async def load(service: Service, request: Request) -> Response:
    return json_response({"server_load": service.admission.num_answers})


async def list_models(service: Service, request: Request) -> Response:
    return json_response(ModelList(data=model_cards(service)))


async def show_model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]

    async def show() -> Response:
        service.served.check_name(name)
        return json_response(_model(service, name))

    return await service.with_adapter(show)


async def expose_metrics(service: Service, request: Request) -> Response:
    try:
        reports = await service.peers.ask()
    except OSError:
        # Without the counts of all frontends the counters would seem to be reset.
        raise UnavailableError("a frontend does not say what it has counted") from None
    page = service.metrics.expose(await service.engine_metrics.read(), reports)
    return Response(page, media_type="text/plain; version=0.0.4")


def model_cards(service: Service) -> list[ModelCard]:
    """The model and its adapters."""
    names = [*service.served.names, *(one.lora_name for one in service.served.adapters)]
    return [_model(service, name) for name in names]


def _model(service: Service, name: str) -> ModelCard:
    adapter = service.served.adapters.find(name)
    parent = None if adapter is None else adapter.base_model_name or service.served.names[0]
    return ModelCard(
        id=name,
        created=service.started,
        root=service.engine.info.model if adapter is None else adapter.lora_path,
        parent=parent,
        max_model_len=service.engine.info.max_model_len,
    )
