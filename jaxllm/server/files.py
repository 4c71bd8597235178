"""/v1/files: files of requests for batches, and those of their answers."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from jaxllm.errors import ValidationError, refused
from jaxllm.openai.batches.objects import DeletedFile, FileList
from jaxllm.openai.batches.store import BatchStore, Page
from jaxllm.openai.errors import NotFoundError
from jaxllm.server.auth import owner_of
from jaxllm.server.errors import Disconnected, json_response
from jaxllm.server.multipart import Form, read_form
from jaxllm.server.service import Service

Result = TypeVar("Result")

_MAX_NAME_CHARS = 256


async def upload_file(service: Service, request: Request) -> Response:
    store, options = store_of(service), service.options
    path = store.new_path()
    await run_in_threadpool(partial(store.check_room, 0))
    try:
        form = await read_form(
            request.scope,
            request.receive,
            path,
            options.max_batch_file_bytes,
            options.client_timeout,
        )
        _check_form(form)
        name = form.filename[:_MAX_NAME_CHARS]
        add = partial(store.add_file, owner_of(request.scope), name, path)
        return json_response(await run_in_threadpool(add))
    except Disconnected:
        return Response(status_code=400)  # for nobody
    finally:
        path.unlink(missing_ok=True)


async def list_files(service: Service, request: Request) -> Response:
    query = known(request, "limit", "after", "order", "purpose")
    page, purpose = page_of(query, 10_000), query.get("purpose")
    owner = owner_of(request.scope)
    data, has_more = await in_store(service, lambda store: store.files(owner, page, purpose))
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return json_response(FileList(data=data, first_id=first, last_id=last, has_more=has_more))


async def show_file(service: Service, request: Request) -> Response:
    known(request)
    owner, name = owner_of(request.scope), request.path_params["id"]
    file, _ = await in_store(service, lambda store: store.file(owner, name))
    return json_response(file)


async def delete_file(service: Service, request: Request) -> Response:
    known(request)
    owner, name = owner_of(request.scope), request.path_params["id"]
    await in_store(service, lambda store: store.delete_file(owner, name))
    return json_response(DeletedFile(id=name))


async def file_content(service: Service, request: Request) -> Response:
    known(request)
    owner, name = owner_of(request.scope), request.path_params["id"]
    _, path = await in_store(service, lambda store: store.file(owner, name))
    # What a client has uploaded is not shown as a page of this server.
    headers = {"X-Content-Type-Options": "nosniff", "Content-Disposition": "attachment"}
    return FileResponse(path, media_type="application/octet-stream", headers=headers)


def store_of(service: Service) -> BatchStore:
    if service.batches is None:
        raise NotFoundError("nothing is stored here; start the server with --batch-dir")
    return service.batches


async def in_store(service: Service, work: Callable[[BatchStore], Result]) -> Result:
    """Run work on the store, which waits for the disk, in a thread."""
    return await run_in_threadpool(work, store_of(service))


def known(request: Request, *names: str) -> dict[str, str]:
    """The parameters in the URL; raise ValidationError for others than these."""
    given = dict(request.query_params)
    for name, value in given.items():
        if name not in names:
            raise refused(name, value, "there is no such parameter")
    return given


def page_of(query: dict[str, str], most: int) -> Page:
    """The part of a list that is asked for."""
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= most:
        raise refused("limit", limit, f"it must be 1 to {most}")
    if order not in ("asc", "desc"):
        raise refused("order", order, "use 'asc' or 'desc'")
    return Page(int(limit), query.get("after"), order == "asc")


def _check_form(form: Form) -> None:
    fields: dict[str, Any] = dict(form.fields)
    purpose = fields.pop("purpose", None)
    if purpose is None:
        raise ValidationError("purpose is missing; give 'batch'", parameter="purpose")
    if purpose != "batch":
        raise refused("purpose", purpose, "only files for batches are kept here; give 'batch'")
    for name, value in fields.items():
        raise refused(name, value, "not supported; leave it out")
