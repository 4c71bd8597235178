"""/v1/batches: many requests in a file, answered when there is room (`jaxllm.server.batch_job`)."""

from starlette.requests import Request
from starlette.responses import Response

from jaxllm.openai.batches.objects import BatchBody, BatchList
from jaxllm.server.auth import owner_of
from jaxllm.server.body import decode_json, read_body
from jaxllm.server.errors import Disconnected, json_response
from jaxllm.server.files import in_store, known, page_of, store_of
from jaxllm.server.service import Service


async def create_batch(service: Service, request: Request) -> Response:
    store_of(service)
    with service.admission.body() as admit:
        try:
            data = await read_body(request.scope, request.receive, service.body_limits, admit)
        except Disconnected:
            return Response(status_code=400)  # for nobody
        body = BatchBody.read(decode_json(data, service.options.max_json_depth))
    owner = owner_of(request.scope)
    return json_response(await in_store(service, lambda store: store.add_batch(owner, body)))


async def list_batches(service: Service, request: Request) -> Response:
    page, owner = page_of(known(request, "limit", "after"), 100), owner_of(request.scope)
    data, has_more = await in_store(service, lambda store: store.batches(owner, page))
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return json_response(BatchList(data=data, first_id=first, last_id=last, has_more=has_more))


async def show_batch(service: Service, request: Request) -> Response:
    known(request)
    owner, name = owner_of(request.scope), request.path_params["id"]
    return json_response(await in_store(service, lambda store: store.batch(owner, name)))


async def cancel_batch(service: Service, request: Request) -> Response:
    known(request)
    owner, name = owner_of(request.scope), request.path_params["id"]
    return json_response(await in_store(service, lambda store: store.cancel(owner, name)))
